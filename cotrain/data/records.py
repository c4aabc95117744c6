"""JSON records from a seeded generator: the third embedded domain, structured text with free fields."""

import json
import random
from typing import Any

FIRST = "Ada Ben Chloe Dmitri Elena Farid Grace Hiro Ines Jonas Kavya Liam Mei Noor Omar Priya Quinn Rosa".split()
LAST = "Almeida Brandt Costa Dubois Eriksen Fischer Garcia Haddad Ivanov Jensen Kim Lopez Meyer Novak Okafor".split()
CITY = "Berlin Lagos Lima Osaka Oslo Paris Porto Quito Riga Rome Seoul Split Tunis Turin Vienna Zurich".split()
ITEM = "anchor basket candle drill easel filter gasket hammer inkwell kettle lantern mallet needle pulley".split()
WORD = "urgent fragile returned gift insured express sealed checked late partial renewed manual draft".split()


def _person(rng: random.Random) -> dict[str, Any]:
    first, last = rng.choice(FIRST), rng.choice(LAST)
    mail = f"{first}.{last}@example.org".lower()
    return {"id": rng.randrange(10**6), "name": f"{first} {last}", "email": mail, "city": rng.choice(CITY)}


def _line(rng: random.Random) -> dict[str, Any]:
    return {"sku": f"{rng.choice(ITEM)}-{rng.randrange(100):02d}", "quantity": rng.randint(1, 9),
            "price": round(rng.uniform(1, 200), 2)}  # fmt: skip


def _order(rng: random.Random) -> dict[str, Any]:
    lines = [_line(rng) for _ in range(rng.randint(1, 4))]
    total = round(sum(line["quantity"] * line["price"] for line in lines), 2)
    return {"order": rng.randrange(10**8), "date": _date(rng), "customer": _person(rng), "lines": lines,
            "total": total, "tags": rng.sample(WORD, rng.randint(0, 3)), "paid": rng.random() < 0.8}  # fmt: skip


def _reading(rng: random.Random) -> dict[str, Any]:
    values = [round(rng.gauss(20, 4), 1) for _ in range(rng.randint(3, 8))]
    return {"sensor": f"s{rng.randrange(40):03d}", "unit": rng.choice(["C", "kPa", "%"]), "at": _date(rng),
            "values": values, "max": max(values), "ok": max(values) < 27}  # fmt: skip


def _event(rng: random.Random) -> dict[str, Any]:
    return {"time": _date(rng), "level": rng.choice(["INFO", "INFO", "WARNING", "ERROR"]),
            "service": rng.choice(["auth", "billing", "search", "mail"]), "user": rng.choice([None, _person(rng)]),
            "latency_ms": rng.randrange(1, 2000), "path": f"/{rng.choice(ITEM)}s/{rng.randrange(999)}"}  # fmt: skip


def _date(rng: random.Random) -> str:
    day = f"{rng.randint(2015, 2025)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    return f"{day}T{rng.randrange(24):02d}:{rng.randrange(60):02d}:00Z"


def records(number: int) -> str:
    """Document `number`: some records of one kind, one JSON object a line or indented."""
    rng = random.Random(number)
    make = rng.choice([_person, _order, _reading, _event])
    indent = rng.choice([None, 2])
    return "\n".join(json.dumps(make(rng), indent=indent) for _ in range(rng.randint(2, 8))) + "\n"
