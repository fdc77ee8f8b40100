"""The `jali` command."""
