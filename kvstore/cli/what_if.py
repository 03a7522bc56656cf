"""``kvstore what-if``: what the running store would find with other memory, or another policy."""

from __future__ import annotations

from kvstore.cli.invocation import Invocation, client_command
from kvstore.cli.json_output import plain, print_json
from kvstore.cli.options import EXIT_FAILED, command
from kvstore.cli.tables import console_of_names, table_of
from kvstore.runtime.formatting import size_text


@command(
    epilog="\b\nExample:\n  kvstore what-if --master 10.0.0.7:50001",
    help="""Show what other sizes of the pool, or another eviction policy, would find.

    The master must run with --what-if. It estimates from a sample of the requests since its start,
    of which older ones count less, within about one point.
    """,
)
@client_command()
def what_if(invocation: Invocation) -> int:
    with invocation.client() as client:
        status = client.status()
    if invocation.as_json:
        print_json(plain(status.what_if))
        return 0
    console = console_of_names(fits=True)
    if not status.what_if:
        console.print(
            "No estimates: start kvstore-master with --what-if, and wait for some thousand blocks "
            "of requests."
        )
        return EXIT_FAILED
    memory = sorted({row.memory for row in status.what_if})
    policies = list(dict.fromkeys(row.policy for row in status.what_if))
    found = {(row.policy, row.memory): f"{row.found_ppm / 10_000:.1f} %" for row in status.what_if}
    table = table_of("memory", *policies, right=("memory", *policies))
    for size in memory:
        table.add_row(size_text(size), *(found.get((policy, size), "") for policy in policies))
    console.print(table)
    return 0
