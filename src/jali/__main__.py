"""`python -m jali` is the command `jali`."""

from jali.cli.main import app

app(prog_name="jali")
