"""State machines without I/O: tables, events and effects; time and identity come in as data."""
