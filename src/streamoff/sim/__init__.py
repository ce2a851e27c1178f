"""Many sites in one event loop: tasks, measurements and the report of a run.

Importing the package, its configuration, its report or its observer imports neither torch nor a loop, so
that the command line can answer before either is loaded.
"""
