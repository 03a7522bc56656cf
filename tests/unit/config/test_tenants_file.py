"""The file of tenants: what is refused, and what a master that runs does when it changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.calls.tenants import UNBOUNDED, TenantMatcher, TenantRule
from kvstore.config.tenants import parse_tenants
from kvstore.errors import ConfigError
from kvstore.master.tenants_file import TenantsFileWatcher

ACME = """
[acme]
namespaces = ["acme/*", "acme"]
guarantee = "20GiB"
limit = "60GiB"
pin_limit = "10GiB"
put_share = 0.5
disk_limit = "2TiB"
"""


def test_a_tenant_as_it_is_written() -> None:
    assert parse_tenants(ACME.encode(), "t") == [
        TenantRule("acme", ("acme/*", "acme"), 20 << 30, 60 << 30, 10 << 30, 0.5, 2 << 40)
    ]
    small = b'[small]\nnamespaces = ["small"]\n'
    assert parse_tenants(small, "t") == [TenantRule("small", ("small",), 0, UNBOUNDED, UNBOUNDED)]
    assert parse_tenants(b"", "t") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ACME + '[b]\nnamespaces = ["acme/x"]\n', r"have namespaces in common: 'acme/\*'"),
        (ACME + 'quota = "1GiB"\n', "'acme': there is no setting quota"),
        (ACME.replace('"20GiB"', '"61GiB"'), "guarantee .* is above limit"),
        (ACME.replace('"20GiB"', '"20G"'), "guarantee = '20G': the unit of '20G'"),
        (ACME.replace('"20GiB"', "true"), "guarantee = True: True is not a size"),
        (ACME.replace('"60GiB"', str(1 << 62)), "limit = .*: must be less than"),
        (ACME.replace("0.5", "0"), "put_share = 0: must be greater than 0"),
        (ACME.replace("0.5", "1.5"), "put_share = 1.5: must be less than or equal to 1"),
        (ACME.replace('"acme/*"', '"a*e"'), "'a\\*e' is no pattern"),
        (ACME.replace('"acme/*"', "7"), "namespaces = 7: must be a valid string"),
        ("[acme]\n", "'acme': namespaces = .*: Field required"),
        ("acme = 3\n", "'acme': it is no table"),
        ('["a b"]\nnamespaces = ["x"]\n', "it is no name"),
        ("[acme\n", "is no TOML"),
        (
            "".join(f'[t{number}]\nnamespaces = ["n{number}"]\n' for number in range(257)),
            "257 tenants, at most 256",
        ),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        parse_tenants(text.encode(), "the-file")
    assert "the-file" in str(refused.value)
    assert refused.value.fields["key"] == "tenants"


def write(path: Path, text: str) -> None:
    """As an editor does, so that the file differs in any case."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@pytest.mark.usefixtures("files_at_once")
def test_a_master_follows_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tenants.toml"
    write(path, ACME)
    file = TenantsFileWatcher(str(path))
    applied: list[Sequence[TenantRule]] = []

    def apply(rules: Sequence[TenantRule], matcher: TenantMatcher) -> None:
        assert matcher.of("acme/x") == "acme"
        applied.append(rules)

    with caplog.at_level(logging.WARNING, "kvstore.files"):
        file.poll_once(apply)
        write(path, ACME + "# a remark\n")
        file.poll_once(apply)
        assert not applied

        write(path, ACME.replace("60GiB", "70GiB"))
        file.poll_once(apply)
        file.poll_once(apply)
        assert [rules[0].limit_bytes for rules in applied] == [70 << 30]
        assert not caplog.records

        write(path, ACME.replace("60GiB", "60G"))
        file.poll_once(apply)
        file.poll_once(apply)
        write(path, "")
        file.poll_once(apply)
    assert len(applied) == 1
    assert file.rules[0].limit_bytes == 70 << 30
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert all("file_refused setting=tenants" in line for line in said)
