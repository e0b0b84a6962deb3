"""calls="prompt" and calls="generated": the steps of a generation."""

import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from language_models import (
    HEADS,
    LANGUAGE_MODELS,
    NEW,
    WIDTH,
    WORDS,
    generate,
    padded_prompts,
    prompt,
    tiny,
)
from models import CellLoop
from oracles import assert_clean, hooks_left, same_tensors
from torch import nn

import hookline as hl

transformers = pytest.importorskip("transformers")


# -- prompt and generated tokens ------------------------------------------------------------------


def bart():
    config = transformers.BartConfig(
        d_model=WIDTH, encoder_layers=1, decoder_layers=2, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=WORDS,
        max_position_embeddings=64, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def mamba():
    config = transformers.MambaConfig(
        hidden_size=WIDTH, state_size=4, num_hidden_layers=2, vocab_size=WORDS, pad_token_id=0
    )
    return transformers.MambaForCausalLM(config)


KINDS_WITH_STEPS = {
    **LANGUAGE_MODELS,
    "BART": SimpleNamespace(make=bart, mlp="model.decoder.layers.1.fc2"),
    "Mamba": SimpleNamespace(make=mamba, mlp="backbone.layers.1.mixer"),
}

STEPS_OF = ("prompt", "generated")


@pytest.fixture(params=KINDS_WITH_STEPS)
def stepping(request):
    torch.manual_seed(0)
    model = KINDS_WITH_STEPS[request.param].make().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.3)
    return SimpleNamespace(**vars(KINDS_WITH_STEPS[request.param]), model=model)


def negated(value):
    return value * -3.0 + 0.5


def scores(model, ids=None, **options):
    """The words of a generation, and the logits of every step."""
    torch.manual_seed(7)
    both = {"return_dict_in_generate": True, "output_logits": True}
    out = generate(model, ids, **both, **options)
    return [out.sequences, *out.logits]


def with_hooks_by_hand(model, path, step, runs):
    """What runs give if hooks written by hand change one step of each: they count its forwards."""
    forwards = [0]

    def count(module, args):
        forwards[0] += 1

    def hook(module, args, output):
        return negated(output) if ("prompt" if forwards[0] <= 1 else "generated") == step else None

    handles = [
        model.register_forward_pre_hook(count),
        model.get_submodule(path).register_forward_hook(hook),
    ]
    results = []
    for run in runs:
        forwards[0] = 0
        results.append(run())
    for handle in handles:
        handle.remove()
    return results


def changed_by_attaching(model, path, step, runs):
    """What runs give with one edit attached; the model is as before afterwards."""
    bare, left = [run() for run in runs], hooks_left(model)  # transformers leaves some of its own
    edit = hl.edit(model, path, negated, calls=step).attach()
    found = [run() for run in runs]
    edit.remove()
    assert not any(map(same_tensors, found, bare))
    assert all(map(same_tensors, [run() for run in runs], bare))
    assert hooks_left(model) == left
    return found


@pytest.mark.parametrize("step", STEPS_OF)
@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "top_k": 10}, {"num_beams": 3}],
    ids=["greedy", "sampling", "beams"],
)
def test_an_attached_edit_changes_one_step_of_every_generation(stepping, step, options):
    model = stepping.model
    runs = [lambda seed=seed: scores(model, prompt(seed=seed), **options) for seed in (0, 1)]
    expected = with_hooks_by_hand(model, stepping.mlp, step, runs)
    found = changed_by_attaching(model, stepping.mlp, step, runs)
    assert all(map(same_tensors, found, expected))


@pytest.mark.parametrize("step", STEPS_OF)
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "num_beams": 2},
        {"prefill_chunk_size": 16},  # one for the whole prompt
    ],
    ids=str,
)
def test_every_way_to_generate_has_a_prompt_and_generated_tokens(decoder, step, options):
    model = decoder.model
    runs = [lambda seed=seed: scores(model, prompt(seed=seed), **options) for seed in (0, 1)]
    expected = with_hooks_by_hand(model, decoder.mlp, step, runs)
    assert all(map(same_tensors, changed_by_attaching(model, decoder.mlp, step, runs), expected))


@pytest.mark.parametrize("step", STEPS_OF)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_no_part_in_what_is_a_prompt(decoder, step, side):
    ids, mask = padded_prompts(side)
    runs = [lambda: scores(decoder.model, ids, attention_mask=mask)] * 2
    expected = with_hooks_by_hand(decoder.model, decoder.mlp, step, runs)
    assert all(
        map(same_tensors, changed_by_attaching(decoder.model, decoder.mlp, step, runs), expected)
    )


@pytest.mark.parametrize("step", STEPS_OF)
def test_a_prompt_of_one_token_is_a_prompt(decoder, step):
    runs = [lambda: scores(decoder.model, prompt()[:, :1])] * 2
    expected = with_hooks_by_hand(decoder.model, decoder.mlp, step, runs)
    assert all(
        map(same_tensors, changed_by_attaching(decoder.model, decoder.mlp, step, runs), expected)
    )


@pytest.mark.parametrize("step", STEPS_OF)
def test_a_prompt_may_be_given_as_embeddings_and_with_a_cache_of_the_user(step):
    model = tiny("Llama")
    embeddings = model.model.embed_tokens(prompt()).detach()

    def run():
        cache = transformers.DynamicCache(config=model.config)
        options = {"inputs_embeds": embeddings, "past_key_values": cache, "do_sample": False}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        out = model.generate(**options, max_new_tokens=NEW, min_new_tokens=NEW)
        return [out.sequences, *out.logits]

    expected = with_hooks_by_hand(model, "model.layers.1.mlp", step, [run, run])
    found = changed_by_attaching(model, "model.layers.1.mlp", step, [run, run])
    assert all(map(same_tensors, found, expected))


@pytest.mark.parametrize("inside", ["model", "model.layers.0"])
@pytest.mark.parametrize("step", STEPS_OF)
def test_a_part_of_the_model_that_takes_the_cache_may_be_given(inside, step):
    model = tiny("Llama")
    runs = [lambda: scores(model)] * 2
    expected = with_hooks_by_hand(model, "model.layers.0.mlp", step, runs)
    place = "model.layers.0.mlp".removeprefix(inside + ".")
    with hl.edit(model.get_submodule(inside), place, negated, calls=step):
        assert all(map(same_tensors, [run() for run in runs], expected))


def test_a_part_that_others_have_filled_the_cache_for_is_refused():
    """The second layer is given a cache with the keys of the first one, also at the prompt."""
    model = tiny("Llama")
    with pytest.raises(hl.ChangeError, match="holds tokens already") as caught:
        with hl.edit(model.model.layers[1], "mlp", negated, calls="prompt"):
            generate(model)
    assert "layers before" in caught.value.found
    assert "whole model" in caught.value.remedy


@pytest.mark.parametrize("step", STEPS_OF)
def test_the_model_may_be_part_of_a_bigger_one(step):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm, self.probe = tiny("Llama"), nn.Linear(WIDTH, 2)

        def forward(self, ids):
            return self.probe(self.lm.model(ids).last_hidden_state)

    model = Wrapped()
    runs = [lambda: scores(model.lm)] * 2
    expected = with_hooks_by_hand(model.lm, "model.layers.0.mlp", step, runs)
    with hl.edit(model, "lm.model.layers.0.mlp", negated, calls=step):
        assert all(map(same_tensors, [run() for run in runs], expected))
    with pytest.raises(hl.NotHookable, match=r"'probe'.*takes a cache"):
        with hl.edit(model, "probe", negated, calls=step):
            raise AssertionError("must not be entered")


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_the_calls_of_an_encoder_are_of_the_prompt(name):
    torch.manual_seed(0)
    model = KINDS_WITH_STEPS[name].make().eval()
    place = "encoder.block.0.layer.1" if name == "T5" else "model.encoder.layers.0.fc2"
    runs = [lambda seed=seed: scores(model, prompt(seed=seed)) for seed in (0, 1)]
    handle = model.get_submodule(place).register_forward_hook(lambda m, a, output: negated(output))
    expected = [run() for run in runs]
    handle.remove()
    assert all(map(same_tensors, changed_by_attaching(model, place, "prompt", runs), expected))
    with pytest.raises(hl.NeverFired, match="none was of the step 'generated'"):
        with hl.edit(model, place, negated, calls="generated"):
            generate(model)
    with hl.capture(model, place, calls="prompt") as record:
        model.get_encoder()(prompt())
    assert len(record.calls(place)) == 1


def test_a_generation_after_one_that_raised_begins_with_its_prompt(decoder):
    model, raising = decoder.model, []

    def stop(module, args):
        raising.append(None)
        if len(raising) == 3:
            raise KeyError("in the middle")

    expected = with_hooks_by_hand(model, decoder.mlp, "prompt", [lambda: scores(model)])[0]
    handle = model.get_submodule(decoder.norm).register_forward_pre_hook(stop)
    with hl.edit(model, decoder.mlp, negated, calls="prompt"):
        with pytest.raises(KeyError, match="in the middle"):
            generate(model)
        assert same_tensors(scores(model), expected)
    handle.remove()
    assert_clean(model)


@pytest.mark.parametrize("step", ["prompt", "generated"])
def test_an_attached_context_keeps_nothing_of_a_generation_alive(decoder, step):
    given = []

    def note(module, args, kwargs):
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) or hasattr(value, "get_seq_length"):
                given.append(weakref.ref(value))

    decoder.model.register_forward_pre_hook(note, with_kwargs=True)
    edit = hl.edit(decoder.model, decoder.mlp, hl.scale(2.0), calls=step).attach()
    gc.collect()
    gc.disable()
    try:
        for inside in (decoder.model, decoder.model.base_model):
            with hl.capture(inside, "**", calls=step, transform=lambda value: None):
                given.append(weakref.ref(generate(decoder.model)))
        assert len(given) > 3 * NEW
        assert [one() for one in given if one() is not None] == []
    finally:
        gc.enable()
        edit.remove()


def test_two_threads_have_prompts_of_their_own(decoder):
    model, results = decoder.model, {}
    together = threading.Barrier(2)
    inputs = {0: prompt(seed=0), 1: prompt(seed=1)}

    class Meet(transformers.StoppingCriteria):
        """Both threads are at the same step."""

        def __call__(self, input_ids, scores, **kwargs):
            together.wait(60)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    expected = {}
    for n, ids in inputs.items():
        runs = [lambda ids=ids: generate(model, ids)]
        (expected[n],) = with_hooks_by_hand(model, decoder.mlp, "generated", runs)

    def run(n):
        options = {"stopping_criteria": transformers.StoppingCriteriaList([Meet()])}
        results[n] = generate(model, inputs[n], **options)

    with hl.edit(model, decoder.mlp, negated, calls="generated"):
        threads = [threading.Thread(target=run, args=(n,)) for n in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(results[n], expected[n]) for n in inputs)


@pytest.mark.parametrize("step", STEPS_OF)
def test_a_capture_of_one_step_keeps_the_numbers_of_the_calls(stepping, step):
    model, twice = stepping.model, range(2 * NEW)
    numbers = [n for n in twice if (n % NEW == 0) == (step == "prompt")]
    with hl.capture(model, stepping.mlp, "lm_head", "lm_head:input") as whole:
        expected = [generate(model), generate(model)]
    places = ("lm_head", "lm_head:input", stepping.mlp)
    with hl.capture(model, *places, calls=step) as record:
        assert same_tensors([generate(model), generate(model)], expected)
    for place in places:
        assert [number for number, _ in record.numbered(place)] == numbers
        for number in numbers:
            assert torch.equal(record[place, number], whole[place, number])
        assert same_tensors(record.calls(place), [whole[place, n] for n in numbers])
        other = next(n for n in twice if n not in numbers)
        with pytest.raises(hl.NotCaptured, match=f"Call {other} .*capture was for others"):
            _ = record[place, other]


def test_a_capture_around_an_edit_sees_the_steps_as_they_are(decoder):
    model = decoder.model
    with hl.capture(model, decoder.mlp) as bare:
        generate(model)
    with hl.capture(model, decoder.mlp, calls="prompt") as before:
        with hl.edit(model, decoder.mlp, negated, calls="prompt"):
            with hl.capture(model, decoder.mlp, calls="prompt") as after:
                generate(model)
    assert torch.equal(before[decoder.mlp], bare[decoder.mlp, 0])
    assert torch.equal(after[decoder.mlp], negated(bare[decoder.mlp, 0]))


def test_the_operations_of_one_step_are_edited_and_captured():
    model = tiny("Llama")
    place = "model.layers.0.mlp.act_fn/silu"
    with hl.capture(model, place) as whole:
        generate(model)
    with hl.capture(model, place, calls="generated") as record:
        generate(model)
    assert same_tensors(record.calls(place), whole.calls(place)[1:])
    expected = with_hooks_by_hand(model, "model.layers.0.mlp.act_fn", "generated", [
        lambda: scores(model)
    ])  # fmt: skip
    with hl.edit(model, place, negated, calls="generated"):
        assert same_tensors(scores(model), expected[0])


def test_a_plain_forward_is_a_prompt_with_gradients_and_when_it_is_checkpointed(decoder):
    model, ids = decoder.model.train(), prompt()
    parameter = model.get_submodule(decoder.heads).weight

    def run():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return parameter.grad.clone()

    for dropout in [m for m in model.modules() if isinstance(m, nn.Dropout)]:
        dropout.p = 0.0
    handle = model.get_submodule(decoder.mlp).register_forward_hook(lambda m, a, o: negated(o))
    expected = run()
    handle.remove()
    place = f"{decoder.mlp}:grad_output"
    with hl.edit(model, decoder.mlp, negated, calls="prompt"):
        with hl.capture(model, place, calls="prompt") as record:
            assert torch.equal(run(), expected)
    with hl.edit(model, decoder.mlp, negated), hl.capture(model, place) as whole:
        run()
    assert torch.equal(record[place, 0], whole[place, 0])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with hl.edit(model, decoder.mlp, negated, calls="prompt"):
        assert torch.equal(run(), expected)


# -- what cannot be told --------------------------------------------------------------------------


def assistant():
    torch.manual_seed(5)
    return tiny("GPT-2")


def several_steps(model, input_ids, **kwargs):
    """A way to generate of one's own, for `custom_generate`."""
    return model(input_ids).logits.argmax(-1)


def continued(model):
    """A second turn of a chat: the cache holds the first one."""
    out = generate(model, return_dict_in_generate=True)
    ids = torch.cat([out.sequences, prompt(seed=3)], 1)
    with torch.no_grad():
        generate(model, ids, past_key_values=out.past_key_values)


def in_pieces(model):
    """A prompt given in two pieces, the second of one token: it could as well be a word."""
    with torch.no_grad():
        first = model(prompt()[:, :-1], use_cache=True)
        model(prompt()[:, -1:], past_key_values=first.past_key_values)


UNTOLD = {
    "an assistant": (
        lambda model: generate(model, prompt(1), assistant_model=assistant()),
        0,
        "assisted decoding",
    ),
    "prompt lookup": (
        lambda model: generate(model, prompt(1), prompt_lookup_num_tokens=2),
        0,
        "assisted decoding",
    ),
    "chunks": (lambda model: generate(model, prefill_chunk_size=4), 1, "chunks"),
    "a last chunk of one token": (lambda m: generate(m, prefill_chunk_size=5), 1, "chunks"),
    "no cache": (lambda model: generate(model, use_cache=False), 1, "without a cache"),
    "a second turn": (continued, NEW, "holds tokens already"),
    "a prompt in pieces": (in_pieces, 1, "holds tokens already"),
    "a way of one's own": (
        lambda model: generate(model, custom_generate=several_steps),
        0,
        "by several_steps",
    ),
    "guidance": (lambda model: generate(model, guidance_scale=2.0), 1, "LogitsProcessor"),
}


@pytest.mark.parametrize("way", UNTOLD)
@pytest.mark.parametrize("step", STEPS_OF)
def test_an_edit_of_a_step_that_cannot_be_told_is_refused_before_it_acts(decoder, way, step):
    model, (run, call, why) = decoder.model, UNTOLD[way]
    told = []

    def note(value, call):
        told.append(call.index)
        return value

    with pytest.raises(hl.ChangeError, match=f"Call {call} cannot be told: .*{why}") as caught:
        with hl.edit(model, decoder.mlp, note, calls=step):
            run(model)
    assert repr(decoder.mlp) in str(caught.value)
    assert told == [n for n in range(call) if (n == 0) == (step == "prompt")]
    assert_clean(model)


@pytest.mark.parametrize("way", UNTOLD)
@pytest.mark.parametrize("step", STEPS_OF)
def test_a_capture_of_a_step_that_cannot_be_told_disturbs_nothing_and_says_so(decoder, way, step):
    model, (run, call, why) = decoder.model, UNTOLD[way]
    with hl.capture(model, decoder.mlp) as whole:
        run(model)
    with pytest.raises(hl.NeverFired, match=f"call {call} cannot be told: .*{why}") as caught:
        with hl.capture(model, decoder.mlp, calls=step) as record:
            run(model)
    assert caught.value.record is record
    with pytest.raises((hl.NotCaptured, hl.NeverFired), match=f"{why}"):
        record.calls(decoder.mlp)
    with pytest.raises((hl.NotCaptured, hl.NeverFired), match=f"{why}"):
        _ = record[decoder.mlp, call]
    if step == "prompt" and call > 0:
        assert torch.equal(record[decoder.mlp, 0], whole[decoder.mlp, 0])


def test_later_forwards_of_assisted_decoding_are_of_generated_tokens(decoder):
    def run():
        generate(decoder.model, prompt(1), prompt_lookup_num_tokens=2)

    with hl.capture(decoder.model, decoder.mlp) as whole:
        run()
    with pytest.raises(hl.NeverFired, match="call 0 cannot be told"):
        with hl.capture(decoder.model, decoder.mlp, calls="generated") as record:
            run()
    for call in range(1, len(whole.calls(decoder.mlp))):
        assert torch.equal(record[decoder.mlp, call], whole[decoder.mlp, call])


def test_loops_without_a_cache_have_no_prompt():
    with pytest.raises(hl.NotHookable, match=r"'cell\[0\]'.*takes a cache"):
        with hl.edit(CellLoop(), "cell[0]", negated, calls="generated"):
            raise AssertionError("must not be entered")
    with pytest.raises(hl.NotHookable, match=r"'\*'.*takes a cache"):
        with hl.capture(CellLoop(), "*", calls="prompt"):
            raise AssertionError("must not be entered")


def test_a_parameter_has_one_gradient_for_prompt_and_generated_tokens():
    model = tiny("Llama")
    with pytest.raises(hl.NotHookable, match="one gradient"):
        with hl.capture(model, "lm_head.weight:grad", calls="prompt"):
            raise AssertionError("must not be entered")


def test_a_module_that_is_called_outside_of_the_forward_is_refused(decoder):
    with pytest.raises(hl.ChangeError, match="outside of every forward"):
        with hl.edit(decoder.model, "lm_head", negated, calls="prompt"):
            decoder.model.lm_head(torch.zeros(1, WIDTH))


class Taker(nn.Module):
    """A model with a cache of its own kind, and a loop of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, past_key_values=None):
        return self.layer(x)


@pytest.mark.parametrize("cache", [None, (), ((torch.zeros(0), torch.zeros(2, 0)),)], ids=str)
def test_a_forward_with_an_empty_cache_is_a_prompt_in_any_model(cache):
    model, x = Taker(), torch.ones(1, 3)
    with hl.capture(model, "layer", calls="prompt") as record:
        model(x, cache), model(x, past_key_values=cache)
    assert len(record.calls("layer")) == 2


@pytest.mark.parametrize(
    "cache", [((torch.zeros(1), torch.zeros(1)),), object()], ids=["tensors", "opaque"]
)
@pytest.mark.parametrize("step", STEPS_OF)
def test_a_forward_with_another_cache_is_refused_in_any_model(cache, step):
    model, x = Taker(), torch.ones(1, 3)
    with pytest.raises(hl.ChangeError, match=r"holds tokens already|does not say"):
        with hl.edit(model, "layer", hl.zero(), calls=step):
            model(x, cache)


def test_a_paged_cache_is_refused():
    """Continuous batching of transformers has prompts and generated tokens in one forward."""
    model = tiny("Llama")
    with pytest.raises(hl.ChangeError, match="does not say"):
        with hl.edit(model, "model.layers.0.mlp", hl.zero(), calls="prompt"):
            model(prompt(), cache=object(), use_cache=False)


def test_a_compiled_model_runs_eagerly_while_calls_are_chosen():
    model, x = Taker(), torch.ones(1, 3)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with hl.edit(compiled, "layer", hl.zero(), calls="prompt"):
        assert not compiled(x).any()
        with pytest.raises(hl.ChangeError, match="holds tokens already"):
            compiled(x, (x,))
    assert compiled(x).any()


@pytest.mark.parametrize("step", STEPS_OF)
def test_the_images_of_a_prompt_are_of_the_prompt(step):
    sizes = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(hidden_size=16, image_size=8, patch_size=4, **sizes)
    text = transformers.LlamaConfig(
        hidden_size=WIDTH, vocab_size=WORDS, max_position_embeddings=64, **sizes
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=WORDS - 1
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[3, *[WORDS - 1] * 4, 5, 6]])

    def run():
        generate(model, ids, pixel_values=torch.ones(1, 3, 8, 8), pad_token_id=0)

    words, images = "model.language_model.layers.0.mlp", "model.vision_tower.encoder.layers.0.mlp"
    with hl.capture(model, "**.layers.0.mlp", calls=step) as record:
        run(), run()
    numbers = [0, NEW] if step == "prompt" else [n for n in range(2 * NEW) if n % NEW]
    assert [number for number, _ in record.numbered(words)] == numbers
    if step == "prompt":
        assert [number for number, _ in record.numbered(images)] == [0, 1]
    else:
        assert list(record.unfired()) == [images]


@pytest.mark.parametrize("step", STEPS_OF)
def test_the_other_options_of_a_capture_hold_for_one_step(decoder, step):
    model, place = decoder.model, decoder.mlp
    numbers = [0, NEW] if step == "prompt" else [n for n in range(2 * NEW) if n % NEW]
    with hl.capture(model, place, f"{place}:input") as whole:
        generate(model), generate(model)
    for options, kept in (
        ({"keep": "first"}, numbers[:1]),
        ({"keep": "last"}, numbers[-1:]),
        ({"threads": "all"}, numbers),
        ({"at": np.s_[:, -1:], "transform": torch.neg, "detach": True}, numbers),
    ):
        with hl.capture(model, place, f"{place}:input", calls=step, **options) as record:
            generate(model), generate(model)
        for at in (place, f"{place}:input"):
            assert [number for number, _ in record.numbered(at)] == kept
            for n in kept:
                value = -whole[at, n][:, -1:] if "at" in options else whole[at, n]
                assert torch.equal(record[at, n], value)
    handle = hl.capture(model, place, calls=step).attach()
    generate(model), generate(model)
    handle.remove()
    assert same_tensors(handle.record.calls(place), [whole[place, n] for n in numbers])
    with hl.capture(model, place, calls=step, stop=True) as record:
        generate(model)
        raise AssertionError("the rest of the block must not run")
    assert [number for number, _ in record.numbered(place)] == numbers[:1]
    assert_clean(model)
