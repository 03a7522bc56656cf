"""A node in a process of its own, for tests that stop, kill and outlive it.

``Peer`` is this side. The other is this file run as a program: it owns one segment, serves it over
tcp, and obeys one command per line of its standard input until that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from kvstore.calls import DeviceLocation, EngineAddress, SegmentInfo
from kvstore.memory.segment import OwnedSegment
from kvstore.node.device_segment import DeviceSegment
from kvstore.runtime.host import SHM_DIRECTORY, host_id
from kvstore.security.credentials import Credentials
from kvstore.security.data_port_tls import NodeTls
from kvstore.security.revocation_list import RevocationList
from kvstore.transport.mooncake.server import EngineServer
from kvstore.transport.tcp_server import DataServer
from tests.support import fake_device
from tests.support.programs import ENGINE

ROOT = Path(__file__).parents[2]


class Peer:
    """Starts the process; ``close`` ends it whatever happened to it and removes what it left."""

    def __init__(
        self,
        name: str,
        size: int,
        *,
        connections_max: int = 64,
        engine: str = "",
        device: str = "",
        capabilities: bool = False,
        auth: str = "",
    ) -> None:
        """
        Args:
            auth: file of its identity, with which it encrypts connections; empty: it does not.
            capabilities: as of ``DataServer``.
            engine: where its transfer engine meets others; empty: it has none.
            device: in whose memory its segment is; empty: in memory of the host.
        """
        self.name = name
        command = [
            sys.executable, "-m", __spec__.name, name, str(size), str(connections_max), engine,
            device, "capabilities" if capabilities else "", auth,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.info = self.ask("info")

    def ask(self, command: str) -> SegmentInfo:
        """Obeyed when this returns; the segment as it is then."""
        reply = json.loads(self._say(command))
        return SegmentInfo(
            segment_id=1,
            node=self.name,
            host=host_id(),
            size=reply["size"],
            uuid=bytes.fromhex(reply["uuid"]),
            shm_name=reply["shm_name"],
            address=f"127.0.0.1:{reply['port']}",
            token=bytes.fromhex(reply["token"]),
            seed=reply["seed"],
            generation=reply["generation"],
            engine=EngineAddress(*reply["engine"]) if reply["engine"] else None,
            device=DeviceLocation(*reply["device"]) if reply["device"] else None,
            encrypts=reply["encrypts"],
        )

    @property
    def entry(self) -> Path:
        """Its segment in the file system."""
        return Path(SHM_DIRECTORY, f"kvstore.{self.name}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = json.loads(self._say("counters"))
        return counters

    def kill(self) -> None:
        """``kill -9``; returns when it is dead."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Freeze it; returns when it is frozen."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.resume()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self.entry.unlink(missing_ok=True)

    def _say(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


def main() -> None:
    fake_device.add()
    name, size, connections_max = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    metadata_server, device = sys.argv[4:6]
    capabilities = bool(sys.argv[6])
    tls = NodeTls(Credentials(sys.argv[7]), RevocationList("")) if sys.argv[7] else None
    segment = DeviceSegment.on(device, name, size) if device else OwnedSegment.create(name, size)
    server = DataServer(
        [segment],
        "127.0.0.1",
        connections_max=connections_max,
        capabilities=capabilities,
        tls=tls,
    )
    server.start()
    engine = None
    if metadata_server:
        settings = ENGINE._replace(metadata_server=metadata_server)
        engine = EngineServer(segment, settings, "127.0.0.1")
    for line in sys.stdin:
        match line.strip():
            case "bump":
                segment.bump_generation()
                server.fence()
                if engine is not None:
                    engine.fence()
            case "restart":
                port = server.port
                server.stop()
                server = DataServer(
                    [segment], "127.0.0.1", port, capabilities=capabilities, tls=tls
                )
                server.start()
            case "counters":
                print(json.dumps(asdict(server.counters())), flush=True)
                continue
        offer = segment.make_offer()
        reply = {
            "size": segment.size,
            "uuid": segment.uuid.hex(),
            "shm_name": offer.shm_name,
            "port": server.port,
            "token": segment.token.hex(),
            "seed": segment.seed,
            "generation": segment.generation,
            "engine": engine and engine.address,
            "device": offer.device,
            "encrypts": server.encrypts,
        }
        print(json.dumps(reply), flush=True)
    server.stop()
    if engine is not None:
        engine.close()
    segment.close()


if __name__ == "__main__":
    main()
