"""Numbers with their units, as people read and write them. Pure."""

import json
import re
from typing import Any

# Of a notice, in both modes: to say how the job ended. GraceTime has been seen half a
# second short.
NOTICE_MARGIN_S = 2.0


def si(number: float, gap: str = "") -> str:
    """A count in four characters or so: 950, 12.3k, 4.56M, 7.89G."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * size:  # or it would print as 1e+03
            return f"{number / size:.3g}{gap}{letter}"
    return f"{number:.3g}{gap}"


def size(amount: float) -> str:
    """Bytes in words: "1.5 GB" for 1.5e9."""
    return f"{si(amount, ' ')}B"


def interval(setting: str) -> tuple[float, str]:
    """(500, "steps") of "500 steps", (600, "s") of "10m"; (0, "") if it is neither."""
    found = re.fullmatch(r"(\d+) *(steps)|(\d+(?:\.\d+)?) *([smh])", setting.strip())
    number, unit = filter(None, found.groups()) if found else ("0", "")
    seconds = {"s": 1, "m": 60, "h": 3600}
    return float(number) * seconds.get(unit, 1), "s" if unit in seconds else unit


def finite(data: Any) -> Any:
    """The same data as JSON reads it back, with None for every number that is not finite:
    JSON has none."""
    return json.loads(json.dumps(data), parse_constant=lambda _: None)
