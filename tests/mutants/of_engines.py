"""Faults of the adapters for vLLM's offloading, SGLang and LMCache, and of the fleet's records.

Tests of the first need vLLM (``make test-vllm``), those of the others the environments of their
engines (``make test-engines``). Whole files of them take minutes, so each fault names one test.
"""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

TIER: Final = "connectors/vllm_tier/"
VLLM: Final = "connectors/vllm/"
SGLANG: Final = "connectors/sglang/"
LMCACHE: Final = "connectors/lmcache/"
FLEET: Final = "kvstore/fleet.py"
RECORDS: Final = ("tests/unit/test_fleet.py",)


def _tier(name: str, file: str, old: str, new: str, test: str, *, folder: str = TIER) -> Mutant:
    return Mutant(name, folder + file, old, new, (f"tests/e2e/engines/test_tier.py::{test}",))


def _sglang(name: str, file: str, old: str, new: str, test: str) -> Mutant:
    tests = (f"tests/engines/sglang/test_backend.py::{test}",)
    return Mutant(name, SGLANG + file, old, new, tests, engine="sglang")


def _lmcache(name: str, file: str, old: str, new: str, test: str) -> Mutant:
    tests = (f"tests/engines/lmcache/{test}",)
    return Mutant(name, LMCACHE + file, old, new, tests, engine="lmcache")


MUTANTS: Final = (
    # --- vLLM's offloading ----------------------------------------------------------------------
    _tier(
        "a-chunk-of-another-size-is-found",
        "tier.py",
        "return [size == self.block_size_bytes for size in self._guard.run(ask)]",
        "return [size is not None for size in self._guard.run(ask)]",
        "test_a_chunk_of_another_size_is_a_miss",
    ),
    _tier(
        "a-lookup-may-take-as-long-as-any-call",
        "tier.py",
        "within = min(timeout_ms, LOOKUP_TIMEOUT_MS)",
        "within = timeout_ms",
        "test_a_lookup_is_given_up_before_other_calls",
    ),
    _tier(
        "some-chunks-loaded-is-all-loaded",
        "tier.py",
        "success=len(loaded) == len(job.keys),",
        "success=bool(loaded),",
        "test_a_load_that_finds_some",
    ),
    _tier(
        "a-chunk-that-is-gone-is-loaded",
        "tier.py",
        "loaded += [key for key, size in pairs if size == self.block_size_bytes]",
        "loaded += [key for key, size in pairs]",
        "test_a_load_that_finds_some",
    ),
    _tier(
        "no-room-counts-as-stored",
        "tier.py",
        "lost = len(job.keys) - len(outcomes) + outcomes.count(PutOutcome.NO_SPACE)",
        "lost = len(job.keys) - len(outcomes)",
        "test_a_full_pool_keeps_what_there_is_room_for",
    ),
    _tier(
        "a-put-that-failed-counts-as-stored",
        "tier.py",
        "lost = len(job.keys) - len(outcomes) + outcomes.count(PutOutcome.NO_SPACE)",
        "lost = outcomes.count(PutOutcome.NO_SPACE)",
        "test_without_an_engine_core_only_a_name_identifies_weights",
    ),
    _tier(
        "a-reset-is-not-waited-for",
        "tier.py",
        "        wait(futures)\n        self._gives_up.clear()",
        "        self._gives_up.clear()",
        "test_a_store_and_a_load_under_way_while_caches_are_reset",
    ),
    _tier(
        "nothing-moves-after-a-reset",
        "tier.py",
        "        self._gives_up.clear()\n",
        "",
        "test_weights_replaced_after_a_reset",
    ),
    _tier(
        "a-failed-load-is-asked-for-again",
        "tier.py",
        "                self._lookups.mark_miss([key for key in job.keys if key not in loaded])\n",
        "                pass\n",
        "test_a_load_that_finds_some",
    ),
    _tier(
        "events-of-what-was-not-stored",
        "tier.py",
        "if self._events is not None and not job.is_promotion and result.success:",
        "if self._events is not None and not job.is_promotion:",
        "test_events_tell_what_was_stored",
    ),
    _tier(
        "a-name-stays-with-other-weights",
        "identity.py",
        '            name = f"{name}, then {weights}"\n',
        "            pass\n",
        "test_a_name_is_that_of_the_first_weights",
        folder=VLLM,
    ),
    _tier(
        "blocks-of-both-weights-are-stored",
        "identity.py",
        "        if self._is_mixed:\n            return\n",
        "",
        "test_weights_replaced_without_a_reset_are_not_mixed",
    ),
    _tier(
        "workers-on-other-hosts-share-a-pool",
        "identity.py",
        "if {each.host for each in hellos} - {host_id()}:",
        "if False:",
        "test_workers_that_cannot_be_identified_or_reached_share_nothing",
    ),
    _tier(
        "weights-that-are-not-known-are-used",
        "identity.py",
        "errors = [each.error for each in hellos if each.error]",
        "errors = [each.error for each in hellos if each.error == 'fatal']",
        "test_workers_that_cannot_be_identified_or_reached_share_nothing",
        folder=VLLM,
    ),
    _tier(
        "pieces-of-chunks-have-no-parent",
        "runs.py",
        "parent = self.keys[start - 1] if start and self.is_chain else self.parent",
        "parent = self.parent",
        "test_pieces_of_a_chain_go_on_where_the_one_before_ends",
    ),
    _tier(
        "a-chain-goes-on-over-a-gap",
        "runs.py",
        "if last is None or parent != last:",
        "if last is None:",
        "test_a_gap_in_a_chain_begins_another_one",
    ),
    _tier(
        "a-chunk-is-its-own-parent",
        "runs.py",
        "self._keys.get((group, (end - 1) // chunk_tokens * chunk_tokens))",
        "self._keys.get((group, end // chunk_tokens * chunk_tokens))",
        "test_a_chain_has_parents",
    ),
    # --- SGLang's HiCache -----------------------------------------------------------------------
    _sglang(
        "pages-behind-a-hole-count",
        "backend.py",
        "return leading + _run(self._found(deadline, pool.part, names[leading:]))",
        "return leading + sum(self._found(deadline, pool.part, names[leading:]))",
        "test_pages_behind_a_hole_do_not_count",
    ),
    _sglang(
        "one-page-is-a-window",
        "backend.py",
        "if run >= min(window, length):",
        "if run:",
        "TestSideCaches::test_a_window",
    ),
    _sglang(
        "a-window-with-a-hole",
        "backend.py",
        "run = run + 1 if is_there else 0",
        "run = run + 1 if is_there else run",
        "TestSideCaches::test_a_window",
    ),
    _sglang(
        "one-page-more-than-a-side-pool-has",
        "backend.py",
        "able = set(range(1, _run(found) + 1))",
        "able = set(range(1, _run(found) + 2))",
        "TestSideCaches::test_what_every_page_needs",
    ),
    _sglang(
        "side-pools-are-taken-for-each-other",
        "backend.py",
        "there[name] = found[at * len(keys) : (at + 1) * len(keys)]",
        "there[name] = found[: len(keys)]",
        "TestSideCaches::test_two_of_them",
    ),
    _sglang(
        "a-page-that-is-gone-is-read",
        "backend.py",
        "there = [read == size for read, size in zip(found, sizes, strict=True)]",
        "there = [True for read, size in zip(found, sizes, strict=True)]",
        "TestSideCaches::test_states_of_mamba_layers",
    ),
    _sglang(
        "a-full-store-has-all-pages",
        "backend.py",
        "return [outcome in _THERE for outcome in outcomes]",
        "return [True for outcome in outcomes]",
        "TestFailures::test_a_full_pool_takes_the_first_pages",
    ),
    _sglang(
        "pages-go-on-from-nothing",
        "backend.py",
        "parent=parent, partial=True, timeout_ms=ms",
        "partial=True, timeout_ms=ms",
        "test_pages_are_chains",
    ),
    _sglang(
        "a-thread-of-the-old-weights-goes-on",
        "backend.py",
        '        if seen != now:\n            raise KVStoreError("the weights have changed")\n',
        "",
        "TestIdentity::test_weights_that_are_replaced_while_it_runs",
    ),
    _sglang(
        "weights-updated-in-place-are-the-same",
        "identity.py",
        '        "weight_version": weights.version,\n',
        "",
        "TestIdentity::test_weights_that_are_replaced_while_it_runs",
    ),
    _sglang(
        "any-draft-model-is-the-same",
        "identity.py",
        '        "draft": weights.draft and _files(weights.draft, weights.draft_revision),\n',
        "",
        "TestIdentity::test_another_draft_model_misses",
    ),
    _sglang(
        "any-packing-is-the-same",
        "identity.py",
        '        "packing": {name: os.environ[name] for name in _PACKING if name in os.environ},\n',
        "",
        "TestIdentity::test_another_packing_misses",
    ),
    _sglang(
        "ranks-of-a-context-share-pages",
        "identity.py",
        '        place.append(f"c{config.attn_cp_rank}")\n',
        "        pass\n",
        "TestIdentity::test_each_rank_has_a_place_of_its_own",
    ),
    _sglang(
        "shards-of-latent-pages-are-one",
        "identity.py",
        'place.append(f"d{config.dcp_rank}")',
        "pass",
        "TestIdentity::test_each_rank_has_a_place_of_its_own",
    ),
    _sglang(
        "stages-of-a-pipeline-share-pages",
        "identity.py",
        'place = [f"t{rank}", f"p{config.pp_rank}"]',
        'place = [f"t{rank}"]',
        "TestIdentity::test_each_rank_has_a_place_of_its_own",
    ),
    _sglang(
        "heads-beside-latent-pages-are-of-all-ranks",
        "backend.py",
        "            and not isinstance(host_pool, MHATokenToKVPoolHost)\n",
        "",
        "TestSideCaches::test_heads_are_of_one_rank_also_beside_latent_pages",
    ),
    _sglang(
        "side-pools-of-any-geometry",
        "backend.py",
        'f".{host_pool_name}-{pages.geometry}"',
        'f".{host_pool_name}"',
        "TestSideCaches::test_another_order_of_their_bytes_misses",
    ),
    _sglang(
        "the-number-of-indices-is-not-checked",
        "pools.py",
        "if indices is None or indices.numel() != count * self.tokens:",
        "if indices is None:",
        "TestFailures::test_bad_arguments_are_misses",
    ),
    # --- LMCache --------------------------------------------------------------------------------
    _lmcache(
        "some-objects-stored-is-all-stored",
        "adapter.py",
        "return L2StoreResult(there == len(keys), moved)",
        "return L2StoreResult(there > 0, moved)",
        "test_adapter.py::test_a_full_pool_takes_the_first_ones",
    ),
    _lmcache(
        "an-object-that-is-gone-is-loaded",
        "adapter.py",
        "                    if size == buffer.nbytes:\n",
        "                    if size != 0:\n",
        "test_adapter.py::test_a_chunk_comes_back_byte_for_byte_also_in_another_daemon",
    ),
    _lmcache(
        "what-is-looked-up-is-not-locked",
        "adapter.py",
        "self._locks.add(namespace, [(keys[index], _name(keys[index])) for index in indices])",
        "pass",
        "test_adapter.py::test_locks_are_counted_and_end_by_themselves",
    ),
    _lmcache(
        "what-is-locked-is-deleted",
        "adapter.py",
        "if layout is not None and key not in self._locks",
        "if layout is not None",
        "test_adapter.py::test_locks_are_counted_and_end_by_themselves",
    ),
    _lmcache(
        "one-unlock-ends-all-locks",
        "locks.py",
        "                    if lock.count <= 0:\n",
        "                    if True:\n",
        "test_adapter.py::test_locks_are_counted_and_end_by_themselves",
    ),
    _lmcache(
        "a-lock-is-kept-for-ever",
        "locks.py",
        "if now - lock.since > HELD_S_MAX:",
        "if False:",
        "test_adapter.py::test_locks_are_counted_and_end_by_themselves",
    ),
    _lmcache(
        "a-task-after-the-end-never-ends",
        "adapter.py",
        "        except RuntimeError:  # closed\n            finished.add(task, failed)\n",
        "        except RuntimeError:  # closed\n            pass\n",
        "test_adapter.py::test_close_ends_tasks_under_way_before_their_memory_is_given_back",
    ),
    _lmcache(
        "ranks-share-their-objects",
        "adapter.py",
        "@{key.kv_rank:x}@",
        "@{0:x}@",
        "test_adapter.py::test_ranks_groups_and_salts_are_apart",
    ),
    _lmcache(
        "objects-of-any-layout",
        "identity.py",
        '**meaning, "objects": layout, **self._more}',
        "**meaning, **self._more}",
        "test_adapter.py::test_what_means_something_else_is_a_miss",
    ),
    _lmcache(
        "both-doors-share-their-objects",
        "identity.py",
        ', "objects": layout, **self._more}',
        ', "objects": layout}',
        "test_inside.py::test_what_the_bytes_depend_on_besides_is_part_of_the_namespace",
    ),
    _lmcache(
        "a-name-is-that-of-all-models",
        "identity.py",
        '{"weights": f"{self._model_id} of {model}"}',
        '{"weights": self._model_id}',
        "test_adapter.py::test_what_means_something_else_is_a_miss",
    ),
    _lmcache(
        "a-chunk-is-whatever-its-size-is",
        "chunks.py",
        "if size == _size([buffer]) and np.array_equal(buffer[1], _description(memory))",
        "if size == _size([buffer])",
        "test_inside.py::test_a_chunk_that_was_replaced_before_it_was_read",
    ),
    _lmcache(
        "a-chunk-is-as-long-as-it-says",
        "chunks.py",
        "return chunk if chunk.length == length else None",
        "return chunk",
        "test_inside.py::test_what_is_no_chunk_spoils_no_other_one",
    ),
    _lmcache(
        "what-is-no-description-is-an-error",
        "chunks.py",
        "except (ValueError, LookupError):",
        "except ZeroDivisionError:",
        "test_inside.py::test_what_is_no_chunk_spoils_no_other_one",
    ),
    _lmcache(
        "memory-of-a-miss-is-not-given-back",
        "chunks.py",
        "release([each for index, each in allocated.items() if index not in found])",
        "pass",
        "test_inside.py::test_a_chunk_that_was_replaced_before_it_was_read",
    ),
    _lmcache(
        "a-put-does-not-hold-its-memory",
        "remote.py",
        "            memory.ref_count_up()\n",
        "            pass\n",
        "test_inside.py::test_a_put_that_is_given_up_keeps_its_memory_until_it_was_read",
    ),
    _lmcache(
        "chunks-behind-a-miss-are-not-given-back",
        "remote.py",
        "        release(_present(found[hits:]))\n",
        "",
        "test_inside.py::test_asynchronous_calls_stop_at_the_first_miss",
    ),
    _lmcache(
        "a-get-that-is-given-up-keeps-its-memory",
        "remote.py",
        "                future.add_done_callback(dropped)\n",
        "                pass\n",
        "test_inside.py::test_a_get_that_is_given_up_gives_its_memory_back",
    ),
    _lmcache(
        "long-names-are-cut",
        "memory.py",
        '    return b"#sha256:" + hashlib.sha256(name).hexdigest().encode()\n',
        "    return name[:KEY_BYTES_MAX]\n",
        "test_inside.py::test_long_keys_are_hashed_and_not_cut",
    ),
    # --- the fleet's records --------------------------------------------------------------------
    Mutant(
        "junk-is-read-for-a-record",
        FLEET,
        "if RECORD_BYTES_MIN <= row.size <= record_bytes_max and",
        "if row.size <= record_bytes_max and",
        RECORDS,
    ),
    Mutant(
        "records-that-are-being-written-are-read",
        FLEET,
        ' and row.state == "complete":',
        ":",
        RECORDS,
    ),
    Mutant(
        "any-number-of-names-is-listed",
        FLEET,
        "for row in islice(rows, ROWS_MAX):",
        "for row in rows:",
        RECORDS,
    ),
    Mutant(
        "any-number-of-bytes-is-read",
        FLEET,
        "        if left < 0:\n            break\n",
        "",
        RECORDS,
    ),
    Mutant(
        "any-number-of-fields-is-a-description",
        FLEET,
        "        and len(record.description) <= FIELDS_MAX\n",
        "",
        RECORDS,
    ),
    Mutant(
        "any-number-of-differences-is-told",
        FLEET,
        "return _differences(ours, theirs)[:FIELDS_MAX]",
        "return _differences(ours, theirs)",
        RECORDS,
    ),
    Mutant(
        "any-number-of-warnings-is-told",
        "connectors/engine/fleet.py",
        "            if len(warnings) >= WARNINGS_MAX:\n                break\n",
        "",
        RECORDS,
    ),
)
