"""Results as text for a person: tables and lines that fit the terminal. No arithmetic on results happens here."""
