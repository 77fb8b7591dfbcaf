"""A usage report as a table for people, as JSON, and as CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass

from tessera.tables_and_drawings import columns, counted, printable
from tessera.usage.report import Amounts, Report, Row

NOTHING_KNOWN = "-"
"""What is unknown or does not apply, in tables."""

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet takes a cell that begins with one of these as a formula."""

SUM_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Style:
    """How a report is shown: names of the key's parts, currency, from what time on a claim counts as idle."""

    key: tuple[str, ...]
    currency: str | None
    idle_after: str
    period: str | None

    @property
    def unit(self) -> str:
        return "slices" if self.period is None else "slice-hours"


def as_table(report: Report, style: Style) -> str:
    """The headline, what is not known, and a table."""
    lines = [headline(report, style)]
    for reason, amount in report.unknown.items():
        lines.append(f"activity unknown for {_measured(amount, style)}: {printable(reason)}")
    for product, amount in report.unpriced.items():
        lines.append(f"no price for {printable(product)}: {_measured(amount, style)} not in the cost")
    if not report.rows:
        return "\n".join(lines)
    header = [*(part.upper() for part in style.key), *_cells(report.total, style)]
    rows = []
    for row in report.rows:
        key = ("(none)" if part is None else printable(part) or '""' for part in row.key)
        rows.append([*key, *_cells(row, style).values()])
    return "\n".join([*lines, "", columns(header, rows)])


def headline(report: Report, style: Style) -> str:
    """``allocated 54 of 80 slices, used 21 (39 %); idle 24 h: 6 claims``."""
    amounts, capacity = report.total.amounts, report.reading.capacity
    of = "" if capacity is None else f" of {number(capacity)}"
    parts = [f"allocated {number(amounts.allocated)}{of} {style.unit}, {_used(amounts)}"]
    if style.period is not None:
        parts = [f"last {style.period}: {parts[0]}, idle {_known(amounts, amounts.idle)}"]
    elif report.total.idle_claims is not None or not report.reading.devices:
        parts.append(f"idle {style.idle_after}: {counted(report.total.idle_claims or 0, 'claim')}")
    else:
        parts.append(f"idle {style.idle_after}: unknown")
    if (cost := report.total.cost) is not None:
        each = "" if style.period is not None else " an hour"
        shares = f"used {_money(cost.used)}, idle {_money(cost.idle)}"
        unknown = f", unknown {_money(cost.unknown)}" if cost.unknown else ""
        parts.append(f"cost {_money(cost.allocated)} {style.currency}{each} ({shares}{unknown})")
    return "; ".join(parts)


def _used(amounts: Amounts) -> str:
    if amounts.used_ratio is None:
        return "used unknown" if amounts.allocated else "used 0"
    if amounts.unknown:
        measured = f"of {number(amounts.known)} with known activity"
        return f"used {number(amounts.used)} {measured} ({_percent(amounts)})"
    return f"used {number(amounts.used)} ({_percent(amounts)})"


def _percent(amounts: Amounts) -> str:
    return NOTHING_KNOWN if amounts.used_ratio is None else f"{amounts.used_ratio * 100:.0f} %"


def _cells(row: Row, style: Style) -> dict[str, str]:
    """The cells of a row, by the headings of their columns."""
    values, amounts = _fields(row, style), row.amounts
    cells = {"ALLOCATED": number(amounts.allocated), "USED": _known(amounts, amounts.used), "USED %": _percent(amounts)}
    if style.period is None:
        memory = NOTHING_KNOWN if row.memory is None else f"{row.memory[0] / 2**30:.1f}/{row.memory[1] / 2**30:.1f} GiB"
        idle = NOTHING_KNOWN if row.idle_claims is None else str(row.idle_claims)
        cells = {"CLAIMS": str(row.claims), **cells, "MEMORY": memory, f"IDLE {style.idle_after.upper()}": idle}
    else:
        cells["IDLE"] = _known(amounts, amounts.idle)
    cells["UNKNOWN"] = number(amounts.unknown) if amounts.unknown else NOTHING_KNOWN
    if style.currency is not None:
        headings = (f"{style.currency}{'/H' if style.period is None else ''}", "OF IT USED", "OF IT IDLE")
        costs = (values["cost"], values["costUsed"], values["costIdle"])
        cells |= {
            heading: NOTHING_KNOWN if cost is None else _money(cost)
            for heading, cost in zip(headings, costs, strict=True)
        }
        cells["UNPRICED"] = number(row.unpriced) if row.unpriced else NOTHING_KNOWN
    return cells


def _known(amounts: Amounts, amount: float) -> str:
    return number(amount) if amounts.known > 0 else NOTHING_KNOWN


def number(amount: float) -> str:
    """At most one decimal, and never 0 for something."""
    if 0 < amount < 0.05:
        return "<0.1"
    return f"{amount:,.1f}".removesuffix(".0")


def _measured(amount: float, style: Style) -> str:
    return f"{number(amount)} {style.unit.removesuffix('s') if amount == 1 else style.unit}"


def _money(amount: float) -> str:
    return f"{amount:,.2f}"


def as_json(report: Report, style: Style) -> str:
    """Groups and total with the same fields as the columns of the CSV; what is unknown is null."""
    document = {
        "unit": style.unit,
        "periodSeconds": report.reading.seconds,
        "capacity": _rounded(report.reading.capacity),
        "currency": style.currency,
        "total": _fields(report.total, style),
        "unknownActivity": [
            {"reason": reason, "amount": _rounded(amount)} for reason, amount in report.unknown.items()
        ],
        "unpriced": [{"product": name, "amount": _rounded(amount)} for name, amount in report.unpriced.items()],
        "warnings": list(report.reading.warnings),
        "groups": [{"key": dict(zip(style.key, row.key, strict=True)), **_fields(row, style)} for row in report.rows],
    }
    return json.dumps(document, indent=2)


def as_csv(report: Report, style: Style) -> str:
    """One line a row after a header, as of RFC 4180; cells of what is unknown are empty."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\r\n")
    writer.writerow([*map(harmless, style.key), *_fields(report.total, style)])
    for row in report.rows:
        values = ("" if value is None else value for value in _fields(row, style).values())
        writer.writerow([*(harmless(part or "") for part in row.key), *values])
    return written.getvalue()


def harmless(cell: str) -> str:
    """A text that no spreadsheet calculates: an apostrophe in front of what looks like a formula."""
    return f"'{cell}" if cell.startswith(FORMULA_STARTS) else cell


def _fields(row: Row, style: Style) -> dict[str, float | None]:
    """The values of a row, by the names of the columns of the CSV."""
    amounts, cost = row.amounts, row.cost
    is_known = amounts.known > 0 or not amounts.allocated
    found: dict[str, float | None] = {
        "allocated": amounts.allocated,
        "used": amounts.used if is_known else None,
        "idle": amounts.idle if is_known else None,
        "unknown": amounts.unknown,
        "usedRatio": amounts.used_ratio,
    }
    if style.period is None:
        found |= {
            "claims": row.claims,
            "idleClaims": row.idle_claims if row.claims else 0,
            "memoryUsedBytes": None if row.memory is None else row.memory[0],
            "memoryTotalBytes": None if row.memory is None else row.memory[1],
        }
    if style.currency is not None:
        found |= {
            "cost": None if cost is None else cost.allocated,
            "costUsed": None if cost is None or cost.known <= 0 else cost.used,
            "costIdle": None if cost is None or cost.known <= 0 else cost.idle,
            "costUnknown": None if cost is None else cost.unknown,
            "unpriced": row.unpriced,
        }
    return {name: _rounded(value) for name, value in found.items()}


def _rounded(value: float | None) -> float | None:
    """Enough digits for a sum; an integer, such as a number of bytes, is one."""
    if value is None or float(value).is_integer():
        return None if value is None else int(value)
    return round(value, SUM_DIGITS)
