"""Memory of a running server over many requests: short ones, streams, clients that leave, mistakes.

    eagle-mars serve --port 8000 &
    python scripts/soak_server.py --url http://127.0.0.1:8000 --requests 300

The last line is one JSON object; the exit status is 1 if memory grew by more than `--limit-mib` after the first third.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

import httpx

HELLO = "Give me one short tip about "
TOPICS = ("cooking", "chess", "gardens", "trains", "sleep", "maps")
_MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--limit-mib", type=float, default=20, help="growth that counts as a leak")
    args = parser.parse_args()
    luck = random.Random(0)
    sizes: list[float] = []
    with httpx.Client(base_url=args.url, timeout=600) as client:
        for number in range(args.requests):
            _request(client, luck, args.max_tokens)
            if number % 10 == 9:
                sizes.append(_resident(client))
                print(f"{number + 1} requests: {sizes[-1]:.1f} MiB", flush=True)
        left = _wait_until_idle(client)
    settled = sizes[len(sizes) // 3 :]  # caches of the allocator and of the tokenizer fill up first
    growth = settled[-1] - settled[0]
    print(json.dumps({"requests": args.requests, "mib": sizes, "growth_mib": round(growth, 2), "still_active": left}))
    return int(growth > args.limit_mib or left > 0)


def _request(client: httpx.Client, luck: random.Random, max_tokens: int) -> None:
    """One of: an answer, a stream, a stream that is left after its first chunks, a mistake."""
    body = {"messages": [{"role": "user", "content": HELLO + luck.choice(TOPICS)}], "max_tokens": max_tokens}
    kind = luck.random()
    if kind < 0.4:
        client.post("/v1/chat/completions", json={**body, "logprobs": luck.random() < 0.5}).raise_for_status()
    elif kind < 0.8:
        left_after = luck.randrange(1, 4) if kind < 0.6 else None
        longer = body if left_after is None else {**body, "max_tokens": 50 * max_tokens}
        with client.stream("POST", "/v1/chat/completions", json={**longer, "stream": True}) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number == left_after:
                    break
    else:
        client.post("/v1/chat/completions", json={**body, "theta": 7})


def _metric(client: httpx.Client, name: str) -> float:
    rows = client.get("/metrics").text.splitlines()
    return next(float(row.split(" ")[1]) for row in rows if row.startswith(name + " "))


def _resident(client: httpx.Client) -> float:
    return _metric(client, "process_resident_memory_bytes") / _MIB


def _wait_until_idle(client: httpx.Client) -> int:
    """Responses that still run after ten seconds, which nobody reads."""
    deadline = time.monotonic() + 10
    while (left := int(_metric(client, "eagle_mars_active_requests"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


if __name__ == "__main__":
    sys.exit(main())
