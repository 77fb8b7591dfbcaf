"""``python -m tests.audit FOLDER``: fails on a right that no process used, and on a request that was refused.

FOLDER has the audit logs of a whole run of the cluster tests (``TESSERA_AUDIT_DIR``; ``make test-cluster`` does both).
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.audit.grants import grants
from tests.audit.log import read
from tests.audit.report import compare
from tests.support.chart import rendered


def main(folder: str) -> int:
    logs = sorted(Path(folder).glob("*.jsonl"))
    if not logs:
        print(f"{folder} has no audit logs: TESSERA_AUDIT_DIR was not set, or no cluster ran", file=sys.stderr)
        return 2
    report = compare(grants(rendered()), read(logs))
    print(report)
    return 0 if report.sound else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
