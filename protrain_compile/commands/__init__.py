"""The subcommands of ``protrain``."""
