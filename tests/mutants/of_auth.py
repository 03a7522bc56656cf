"""Faults in what says who may do what."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

GATE: Final = ("tests/unit/master/test_gate.py",)
IDENTITY: Final = ("tests/unit/auth/test_identity.py", "tests/unit/auth/test_rights.py")
DATA_PORT: Final = ("tests/unit/transport/test_tcp_tls.py",)
ZEROED: Final = ("tests/unit/master/test_zeroing.py", "tests/unit/memory/test_segment.py")
RIGHTS: Final = ("tests/unit/auth/test_rights.py",)

MUTANTS: Final = (
    Mutant("a-node-has-any-name", "kvstore/auth/data_port.py",
        "return who.may_be_node(node) and certified in", "return certified in",
        DATA_PORT),
    Mutant("the-revoked-get-bytes", "kvstore/auth/data_port.py",
        "return not self._revoked.has(who)", "return bool(who)", DATA_PORT),
    Mutant("who-is-accepted-is-not-asked", "kvstore/transport/tcp_connection.py",
        "if tls is not None and not tls.accepts(self._stream.certificate):",
        "if tls is not None and not tls:", DATA_PORT),
    Mutant("back-to-plain-without-an-identity", "kvstore/transport/tcp_client.py",
        "encrypts = self._encrypts\n",
        "encrypts = self._encrypts and self._tls is not None\n",
        DATA_PORT),
    Mutant("old-tls-is-let-in", "master/gate.py",
        "        if version != _TLS:\n", "        if not version:\n", GATE),
    Mutant("a-peer-without-an-identity-is-let-in", "master/gate.py",
        "        if self.required:\n            raise self.refusal(",
        "        if not self:\n            raise self.refusal(", GATE),
    Mutant("the-revoked-get-in", "master/gate.py",
        "        if self._revoked.has(who):\n", "        if self._revoked is None:\n", GATE),
    Mutant("any-signature-counts", "master/gate.py",
        "if not hmac.compare_digest(mac, self._mac(secret, body)) or",
        "if", GATE),
    Mutant("a-token-outlives-its-term", "master/gate.py",
        "hmac.digest(self._key + secret, body", "hmac.digest(self._key, body", GATE),
    Mutant("a-token-is-good-beside-any-certificate", "master/callers.py",
        "        if who is not None and who.name != named.name:\n            return None\n",
        "", GATE),
    Mutant("a-token-without-a-signature-is-good", "master/callers.py",
        "    if who is not None or (gate is not None and gate.required):\n        return None\n",
        "", GATE),
    Mutant("numbers-belong-to-nobody", "master/gate.py",
        "    return half << 32 | (", "    return (", GATE),
    Mutant("a-holder-is-a-name", "master/gate.py",
        "return _holder(plain(who.number) or who.uri)", "return _holder(who.name)", GATE),
    Mutant("revoked-holders-are-never-forgotten", "kvstore/auth/revoked.py",
        "while self._lately and next(iter(self._lately.values())) <= now:", "while False:", GATE),
    Mutant("a-put-has-the-number-that-it-says", "master/gate.py",
        "return request._replace(client_number=number) if",
        "return request if", GATE),
    Mutant("anybody-ends-a-put", "master/gate.py",
        "put is not None and put.client_number != number for put in puts",
        "put is not None and not number for put in puts", GATE),
    Mutant("a-pattern-is-a-beginning", "kvstore/auth/identity.py",
        "if name.startswith(pattern[:-1]) if pattern.endswith(\"*\") else name == pattern:",
        "if name.startswith(pattern.rstrip(\"*\")):", IDENTITY),
    Mutant("patterns-make-an-observer-an-engine", "kvstore/auth/identity.py",
        "        return ENGINE in self.roles and matches(patterns, namespace)\n",
        "        return matches(patterns, namespace)\n", IDENTITY),
    Mutant("all-namespaces-are-one-of-mine", "kvstore/auth/rights.py",
        "        if not namespace or not may(namespace):\n",
        "        if namespace and not may(namespace):\n", RIGHTS),
    Mutant("freed-memory-is-not-zeroed", "kvstore/memory/segment.py",
        "                self._zero(start, min(ZERO_STEP, stop - start))\n",
        "                pass\n", ZEROED),
    Mutant("an-evicted-extent-keeps-its-bytes", "master/state/reclaim.py",
        "wiping.zeroed.append(0 if kept or residue.kept else length)",
        "wiping.zeroed.append(0)", ZEROED),
    Mutant("memory-that-is-read-is-zeroed", "master/state/reclaim.py",
        "wiping.zeroed.append(0 if kept or residue.kept else length)",
        "wiping.zeroed.append(length)", ZEROED),
    Mutant("gaps-keep-their-bytes", "master/state/reclaim.py",
        "        if segment.zeroes:\n            segment.reclaim_bytes += length\n",
        "        if segment.zeroes and not length:\n            segment.reclaim_bytes += length\n",
        ZEROED),
    Mutant("readers-write", "kvstore/auth/rights.py",
        "verb, may = \"write\", who.may_write", "verb, may = \"write\", who.may_read", RIGHTS),
)  # fmt: skip
