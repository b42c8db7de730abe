"""What people see: conditions, columns, Events."""
