"""Another process: gets values into its GPU's memory and prints a digest of each.

python -m tests.gpu.other MASTER NAMESPACE TRANSPORT KEY...
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

from kvstore import Client
from tests.gpu.machine import NAME, machine


def main(master: str, namespace: str, transport: str, *keys: str) -> None:
    with machine() as gpu, Client(master, namespace=namespace, transports=(transport,)) as client:
        digests = []
        for value in client.get_many(keys, device=NAME):
            assert isinstance(value, torch.Tensor)
            flat = gpu.read(value).contiguous().reshape(-1).view(torch.uint8)
            digests.append(hashlib.sha256(flat.numpy().tobytes()).hexdigest())
    print(json.dumps(digests))


if __name__ == "__main__":
    main(*sys.argv[1:])
