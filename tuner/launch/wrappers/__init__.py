"""How a written launch is started on a machine or by a scheduler: one file each, around any launcher's files."""
