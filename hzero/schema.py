"""User input: the base of its pydantic models, their validation with errors of one line, and durations."""

from __future__ import annotations

import contextlib
import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hzero.errors import ConfigError, one_of

#: A rate or a time. Quotients of numbers outside these limits may overflow.
Quantity = Annotated[float, Field(ge=1e-9, le=1e12, allow_inf_nan=False)]
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
M = TypeVar("M", bound=BaseModel)


class Frozen(BaseModel):
    """Base of models of user input: immutable, no unknown keys, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        """Refuses unknown keys with the nearest known key, before pydantic reports a required key as missing."""
        keys = [field.alias or name for name, field in cls.model_fields.items()]
        if not isinstance(values, (Mapping, cls)):
            raise ValueError(f"found {reprlib.repr(values)}; expected a block with keys {', '.join(keys)}")
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if key not in keys:
                raise one_of("", key, keys, "key")
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f".{key}: found {reprlib.repr(value)}; expected a text without NUL")
        return values


def validated(model: type[M], values: Any, where: str) -> M:
    """Validates ``values`` as a ``model``.

    Args:
        model: A pydantic model. Its validators raise `ValueError` with the message after the key. The message may begin with
            the rest of the key, as in ``.nodes: missing``.
        values: The mapping that the user wrote.
        where: Key, option or file of the values, with which the message begins; "" for none. The name of a file ends with a
            colon: ``node.yaml:`` gives ``node.yaml: devices: found ...``.

    Raises:
        ConfigError: The first error, on one line.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    except OverflowError as error:
        raise ConfigError(f"{where.rstrip(':')}: a number is too large ({error})".lstrip(": ")) from None
    found, cause = first.get("input"), first.get("ctx", {}).get("error")
    wanted = first["msg"].replace("Input should be", "expected", 1)
    keys, message = [where, *first["loc"]], f"found {reprlib.repr(found)}; {wanted[0].lower()}{wanted[1:]}"
    if isinstance(cause, ValueError):
        message = str(cause)
        if message.startswith("."):
            rest, _, message = message[1:].partition(": ")
            keys.append(rest)
    # Pydantic writes "[key]" for the key of a dictionary. After a file's name and its colon, a new key begins.
    key = ".".join(str(part) for part in keys if part not in ("", "[key]")).replace(":.", ": ", 1).removesuffix(":")
    if first["type"] == "literal_error":
        listed = first["ctx"]["expected"].replace(" or ", ",").split(",")  # pydantic's "'a', 'b' or 'c'"
        raise one_of(key, found, [choice.strip().strip("'") for choice in listed])
    if first["type"] == "missing":
        message = "missing"
    raise ConfigError(" ".join(f"{key or 'input'}: {message}".split()))  # values may contain line breaks


def seconds_of(duration: str | float) -> float:
    """Parses a duration such as ``2h``, ``1h30m``, ``1:30:00``, ``45s``, or a number of seconds. Returns seconds.

    Raises:
        ValueError: The text is not a duration. The message has no key.
    """
    text, seconds = str(duration), 0.0
    if re.fullmatch(r"(\d{1,9}[dhms])+", text):
        seconds = sum(int(number) * _SECONDS[unit] for number, unit in re.findall(r"(\d+)(\w)", text))
    elif re.fullmatch(r"[\d.]{1,20}(:[\d.]{1,9}){0,2}", text):
        with contextlib.suppress(ValueError):  # several decimal points
            for part in text.split(":"):
                seconds = 60 * seconds + float(part)
    if not seconds:
        raise ValueError(f"found {reprlib.repr(duration)}; expected seconds, or a duration such as 1h30m or 1:30:00")
    return seconds
