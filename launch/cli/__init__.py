"""The ``lockstep`` command line: arguments, output, and one module per command."""
