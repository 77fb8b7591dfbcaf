"""The file of ``tessera usage --prices``: what an hour of a GPU costs, by product."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from driver.config.libyaml_loader import read_yaml
from driver.errors import UsageError, invalid_fields

FILE_LIMIT = 1024 * 1024


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, str_max_length=256, allow_inf_nan=False
    )


class Price(_Model):
    """The price of a full GPU. ``product``: name as NVML gives it; ``*``, ``?`` and ``[...]`` match as in a shell."""

    product: Annotated[str, Field(min_length=1)]
    per_gpu_hour: Annotated[float, Field(strict=True, ge=0)]


class Prices(_Model):
    """Prices by product: the first that matches counts."""

    currency: Annotated[str, Field(pattern=r"^[A-Za-z]{1,12}$")]
    prices: Annotated[tuple[Price, ...], Field(min_length=1, max_length=1000)]

    def price_of(self, product: str) -> float | None:
        """Price of a full GPU for an hour; None if no entry matches."""
        return next((price.per_gpu_hour for price in self.prices if fnmatchcase(product, price.product)), None)


def read_prices(file: Path) -> Prices:
    """Read a file. Raises UsageError that names every invalid field."""
    called = f"--prices {file}"
    try:
        with file.open("rb") as opened:
            text = opened.read(FILE_LIMIT + 1)
    except OSError as error:
        raise UsageError(f"{called}: can't be read: {error.strerror}") from error
    if len(text) > FILE_LIMIT:
        raise UsageError(f"{called}: is larger than 1 MiB; it has `currency` and `prices`")
    try:
        return Prices.model_validate(read_yaml(text))
    except yaml.YAMLError as error:
        raise UsageError(f"{called}: is no YAML: {' '.join(str(error).split())[:300]}") from error
    except ValidationError as error:
        raise invalid_fields(called, error) from error
