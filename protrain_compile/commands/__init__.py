"""The subcommands of ``protrain``, one module each.

A module's ``add`` declares the command on the main parser and sets two defaults: ``parser`` (its own, for messages) and
``execute``, which takes the parsed arguments and returns the exit status.
"""
