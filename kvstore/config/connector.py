"""The settings of the vLLM connector."""

from __future__ import annotations

from pydantic import Field

from kvstore.config.store import StoreSettings
from kvstore.config.values import (
    Bytes,
    Count,
    Label,
    Milliseconds,
)


class ConnectorConfig(StoreSettings):
    """Settings of the connector of an inference engine (vLLM: ``kv_connector_extra_config``)."""

    section = "connector"

    memory: Bytes = Field(
        default=0,
        description="Memory that each worker pools (4GiB), served by a child process; 0: none.",
    )
    save_decode: bool = Field(
        default=True,
        description="Store the blocks of generated tokens, too, and on engines of kv_role "
        "kv_consumer: the next turn of a conversation finds them, on whichever engine it lands.",
    )
    model_id: Label = Field(
        default="",
        description="A name for the weights, in place of a digest of what the engine has "
        "loaded. Engines share blocks only when it is equal: give equal names to equal weights.",
    )
    lookup_deadline_ms: Milliseconds = Field(
        default=20,
        ge=1,
        le=10_000,
        description="How long a request waits to learn what the store has, before that counts as "
        "nothing. Other requests go on meanwhile.",
    )
    pin_timeout_ms: Milliseconds = Field(
        default=60_000,
        ge=100,
        le=3_600_000,
        description="How long a block may wait to be saved, and be kept from other use for it; "
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (seconds) sets it, too.",
    )
    shares_named_media: bool = Field(
        default=False,
        description="Load and save blocks of requests that name an image, sound or video "
        "(multi_modal_uuids) instead of letting vLLM hash it: if clients give equal names only to "
        "equal contents, on all engines and for ever.",
    )
    tp_shards: Count = Field(
        default=0,
        ge=0,
        le=1_024,
        description="Store the KV heads of a block in so many shards, so that engines of other "
        "tensor-parallel sizes find them: a number that all their sizes divide, the same in all. "
        "0: engines of one size share.",
    )
    block_tokens: Count = Field(
        default=0,
        ge=0,
        le=65_536,
        description="Store each block as objects of so many tokens, under the keys of an engine "
        "with such blocks, so that engines of other block sizes find them: a number that divides "
        "all their block sizes. 0: one object each.",
    )
