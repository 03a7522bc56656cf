"""Images that a client names, in a model that sees them."""

from __future__ import annotations

from tests.e2e.engines.conftest import MakeModel, StartEngine, prompt
from tests.e2e.engines.engine import transfer_config
from tests.e2e.engines.test_engine import WHOLE
from tests.e2e.engines.test_identity import objects
from tests.support.cluster import Cluster

ASK = f"""
    import numpy
    from PIL import Image
    from vllm import SamplingParams

    def ask(seed, name="", is_rendered=False, **more):
        pixels = numpy.random.default_rng(seed).integers(0, 255, (28, 28, 3), numpy.uint8)
        given = {{
            "prompt_token_ids": {prompt(1)}, **more,
            "multi_modal_data": {{"image": [Image.fromarray(pixels)]}},
        }}
        if name and not is_rendered:
            given["multi_modal_uuids"] = {{"image": [name]}}
        (rendered,) = llm.llm_engine.renderer.render_cmpl([given], skip_mm_cache=is_rendered)
        if is_rendered:  # as from a client of /inference/v1/generate
            rendered["mm_hashes"] = {{"image": [name]}}
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        llm.llm_engine.add_request("request", rendered, sampling)
        while llm.llm_engine.has_unfinished_requests():
            done = [*llm.llm_engine.step(), None][0]
        tokens = list(done.outputs[0].token_ids)
        return done.num_cached_tokens, tokens, str(rendered["mm_hashes"]["image"][0])

    result = ask(ARGUMENTS)
"""


def test_an_image_that_has_the_hash_of_another_as_its_name_is_neither_shared_nor_taken_for_it(
    store: Cluster, make_model: MakeModel, engine: StartEngine
) -> None:
    one = engine(make_model("--kind", "images"), transfer_config(store.address))

    def ask(arguments: str) -> tuple[int, list[int], str]:
        cached, tokens, name = one.run(ASK.replace("ARGUMENTS", arguments))
        one.saved()
        return cached, tokens, name

    _, right, name = ask("1")
    assert objects(store)
    assert one.reset(store=True)
    for more in ("", ", is_rendered=True", ", mm_processor_kwargs={'do_convert_rgb': True}"):
        _, wrong, _ = ask(f"2, {name!r}{more}")
        assert wrong != right
        assert objects(store) == {}
    assert ask("1") == (0, right, name)
    assert one.reset()
    assert ask("1") == (WHOLE, right, name)
