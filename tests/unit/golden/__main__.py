"""``python -m tests.unit.golden``: write the kept outputs anew.

Then look at ``git diff tests/unit/golden`` line by line: what it shows is what people will see. The facts that the
outputs were compared with are in ``driver/simulator/data/node_topologies.json``.
"""

from __future__ import annotations

from driver.simulator.description import known_descriptions
from tests.unit.golden.outputs import FOLDER, kept, printed


def main() -> None:
    for file in FOLDER.glob("*.txt"):
        file.unlink()
    for node in known_descriptions():
        kept(node).write_text(printed("--gpus", f"sim:{node}"), encoding="utf-8")
        print(kept(node))


if __name__ == "__main__":
    main()
