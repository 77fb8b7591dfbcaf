"""Write what the version at hand writes; see the package."""

from __future__ import annotations

from tests.unit.golden.versions.written import folder, write

if __name__ == "__main__":
    write(folder())
    print(folder())
