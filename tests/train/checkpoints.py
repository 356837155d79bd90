"""Small local checkpoints and conversations, and what is checked of an export, for processes that have imported transformers."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

WORDS = ["one", "two", "three", "four", "five"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
#: Ties its embeddings.
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 64}
#: Without marks of what the assistant says, and without a line break behind a turn.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer() -> Any:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    text = [f"what is {a} and {b}? it is" for a in WORDS for b in WORDS]
    trained.train_from_iterator(text, vocab_size=300, special_tokens=["<s>", "</s>"])
    made = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def make(folder: Path) -> int:
    """Writes ``llama``, ``gpt2`` and ``chat.jsonl`` into a folder."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for shape in (LLAMA, GPT2):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[str(shape["model_type"])].from_dict({**shape, "bos_token_id": 0, "eos_token_id": 1})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / str(shape["model_type"]))
        tokenizer().save_pretrained(folder / str(shape["model_type"]))
    chosen = random.Random(0)
    lines = []
    for number in range(120):
        a, b = chosen.randrange(5), chosen.randrange(5)
        question, answer = f"what is {WORDS[a]} and {WORDS[b]}?", f" it is {a + b + 2}" * (1 + number % 3)
        if number % 4:
            said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            lines.append({"messages": said})
        else:
            lines.append({"prompt": question, "completion": answer})
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


def check_export(run: Path, world: int, start: Path) -> int:
    """The export of a run has the weights that the ranks trained, and the run began with those of a checkpoint."""
    import torch
    import yaml
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hzero.settings.settings import Settings
    from hzero.train import corpus
    from hzero.train.batches import Batch, batches_of

    settings = Settings(yaml.safe_load((run / "config.yaml").read_text()), world_size=world)
    job = json.loads((run / "logs" / "job.json").read_text())
    found = corpus.load(Path(job["tokens"]), settings["data"]["eval_share"], job["source"])
    ranks = [batches_of(found, settings, rank) for rank in range(world)]

    def mean(model: Any, batches: list[Batch]) -> float:
        """Over all tokens that count, whichever batch they are in."""
        total = count = 0.0
        for batch in batches:
            inputs = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
            counted = int((inputs["labels"][:, 1:] != -100).sum())
            # With a cache transformers takes packed examples for one.
            total += float(model(**inputs, use_cache=False).loss) * counted
            count += counted
        return total / count

    with torch.no_grad():
        exported = AutoModelForCausalLM.from_pretrained(run / "export").eval()
        summary = json.loads((run / "summary.json").read_text())
        turns = range(settings["train"]["eval_batches"])
        loss = mean(exported, [rank.evaluation(turn) for rank in ranks for turn in turns])
        assert abs(loss / summary["eval"]["loss_exact"] - 1) < 1e-6, (loss, summary["eval"])

        first = AutoModelForCausalLM.from_pretrained(start).train()
        for module in first.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        micros = range(settings["train"]["grad_accumulation"])
        loss = mean(first, [rank.training(1, micro) for rank in ranks for micro in micros])
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert abs(loss / rows[0]["loss"] - 1) < 2e-3, (loss, rows[0])  # of `topo` the weights are rounded

        words = AutoTokenizer.from_pretrained(run / "export")
        sample = json.loads((run / "samples.jsonl").read_text().splitlines()[-1])
        ids = words(sample["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        written = exported.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
        assert words.decode(written[0, ids.shape[1] :]) == sample["text"], sample
        assert words.chat_template == TEMPLATE
    return 0


def check_packing(folder: Path) -> int:
    """Packed examples do not see each other: their results are those of examples alone. Where they do, it is noticed."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from hzero.train.examples import prepare, sequences
    from hzero.train.packing import check_packing as check
    from hzero.validation import ConfigError

    group = {"path": str(folder / "chat.jsonl"), "max_bytes": None, "eval_share": 0.2, "chat_template": None}
    found = prepare({**group, "cache_dir": str(folder / "packing")}, 300, tokenizer(), lambda message: None)
    laid = sequences(found, 64, packing=True)
    pieces = next(pieces for pieces in laid.pieces if len(pieces) > 1)
    alone = [torch.from_numpy(found.ids[first : first + size].astype(np.int64))[None] for first, size in pieces]
    packed = torch.cat(alone, 1)
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in alone])[None]
    with torch.no_grad():
        for name in ("llama", "gpt2"):
            model = AutoModelForCausalLM.from_pretrained(folder / name).eval()
            expected = torch.cat([model(ids, use_cache=False).logits for ids in alone], 1)
            logits = model(packed, position_ids=positions, use_cache=False).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            # Without positions they would see each other, so the comparison can fail.
            assert (model(packed, use_cache=False).logits - expected).abs().max() > 1e-3
            model.config.use_cache = False
            check(model, 300, 64, torch.device("cpu"))
    # It takes positions and has masks of its own.
    other = CONFIG_MAPPING["openai-gpt"].from_dict({**GPT2, "model_type": "openai-gpt"})
    try:
        check(AutoModelForCausalLM.from_config(other), 300, 64, torch.device("cpu"))
    except ConfigError as error:
        assert "packed examples see each other" in str(error)
    else:
        raise AssertionError("examples that see each other were not noticed")
    return 0


def check_examples(folder: Path) -> int:
    """What the loss counts of each kind of line, by the tokenizer's template and by the plain one; cut, split, weighted."""
    from hzero.train import data
    from hzero.train.examples import prepare, sequences

    lines = [
        {"messages": [{"role": r, "content": c} for r, c in (("user", "what?"), ("assistant", "one é"))]},
        {
            "messages": [
                {"role": r, "content": c}
                for r, c in (("system", "be"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
            ]
        },
        {"prompt": "five and", "completion": " six"},
        {"text": "it is " * 50},
        {"prompt": "", "completion": ""},
    ]
    lines[0]["messages"][0]["content"] = [{"type": "text", "text": "what"}, {"type": "text", "text": "?"}]  # type: ignore[index]
    folder = folder / "examples"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    group = {"path": str(folder), "max_bytes": None, "eval_share": 0.2, "cache_dir": str(folder / "cache")}
    (folder / "bad.jinja").write_text("{% for m in messages %}{{ m.content }}{{ loop.length }}{% endfor %}")
    endless = tokenizer()  # as one that has been trained on text
    endless.eos_token = endless.chat_template = None
    for words, ends, vocab in ((tokenizer(), "</s>", 300), (None, "<|endoftext|>", 280), (endless, "", 300)):
        found = prepare({**group, "chat_template": None}, vocab, words, lambda message: None)
        if words is None:
            from hzero.train.tokenizer import of_file

            words = of_file(data.entry(group, found.key) / "tokenizer.json")
        starts = np.cumsum([0, *found.table[:, 0]])
        learnt = [words.decode(found.ids[a:b][found.counted[a:b] == 1]) for a, b in pairwise(starts)]
        turn = ends or "\n"
        assert learnt == [f"one é{turn}", f"b{turn}d{turn}", f" six{ends}", lines[3]["text"] + ends, ends], learnt
        assert words.decode(found.ids[starts[2] : starts[3]]) == f"five and six{ends}"
        packed, alone = sequences(found, 110, packing=True), sequences(found, 110, packing=False)
        assert max(packed.lengths) <= 110 and len(packed.pieces) < len(alone.pieces)
        assert packed.counts.sum() == alone.counts.sum() and packed.lengths.sum() == alone.lengths.sum()
        alone = sequences(found, 24, packing=False)
        assert alone.cut == (found.table[:3, 0] > 24).sum() > 0
        # All of the long text is there, in several sequences.
        covered = sum(size for pieces in alone.pieces for first, size in pieces if first >= starts[3])
        assert covered == found.table[3, 0]
    try:
        prepare({**group, "chat_template": str(folder / "bad.jinja")}, 300, tokenizer(), print)
        raise AssertionError("a template that cannot be followed was used")
    except ValueError as error:
        assert "a.jsonl:1: messages.1: the chat template writes this turn otherwise" in str(error), error

    # A text of one's own is taken whole; of the standard library there is a maximum.
    data._STDLIB_BYTES = 1000
    (folder / "book.txt").write_text("the quick brown fox\n" * 500)
    text = {**group, "path": str(folder / "book.txt")}
    counts = [
        len(data.prepare({**text, "max_bytes": limit}, 300, 8, 1, tokenizer=tokenizer()).train)
        for limit in (None, 0, 1000)
    ]
    assert counts[0] == counts[1] > 5 * counts[2]
    return 0


def check_architectures(folder: Path) -> int:
    """Parameters are counted without memory for them; floating-point operations know experts and tied embeddings."""
    import torch
    from transformers import AutoModelForCausalLM

    from hzero.settings.architecture import architecture
    from hzero.train.model import flops_per_token

    for name in ("llama", "gpt2"):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        group = {"path": str(folder / name), "config": None, "seq_length": 64}
        assert sum(architecture(group).numels) == sum(param.numel() for param in model.parameters())
    group = {"path": str(folder / "gpt2"), "config": None, "seq_length": 64}
    tied = sum(param.numel() for param in model.parameters())
    assert flops_per_token(group) == 6 * tied + 12 * 2 * 32 * 64
    experts = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    dense = 32 * (32 + 2 * 16 + 32) + 32 * 8 + 2 * 32  # queries, keys and values, output; router; norms of a layer
    found = architecture({"path": None, "config": experts})
    assert found.multiplied == 300 * 32 + 32 + 2 * (dense + 2 * 3 * 32 * 64)
    large = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}
    large |= {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 128}
    assert sum(architecture({"path": None, "config": large}).numels) == 70_553_706_496
    assert torch.get_default_device().type == "cpu"
    return 0
