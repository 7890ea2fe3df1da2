"""The command line: a module a command, with ``add_arguments(parser)`` and ``main(args)``."""
