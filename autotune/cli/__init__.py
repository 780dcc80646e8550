"""The command line: parse, call the library, print. One module per command."""
