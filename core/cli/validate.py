"""`hoptrace validate`."""
import click


@click.command("validate")
@click.argument("trace")
def command(trace: str) -> None:
    """Placeholder until the checks land."""
