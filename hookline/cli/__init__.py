"""The command line, `hookline …`: one file for each kind of command. It needs click and rich."""
