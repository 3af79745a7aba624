"""The PostgreSQL server that storage tests run against."""

from __future__ import annotations

import psycopg
import pytest

from tests.postgres import postgres


def test_a_server_answers_and_is_gone_afterwards() -> None:
    with postgres() as url:
        plain = url.replace("+psycopg", "")
        with psycopg.connect(plain) as connection:
            assert connection.execute("select 6 * 7").fetchone() == (42,)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(plain, connect_timeout=2)
