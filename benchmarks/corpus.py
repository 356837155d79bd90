"""Documents per second of `hzero data prepare` and of `datasets`, from JSON lines to packed token ids in files, in turns."""

import json
import statistics
import tempfile
import time
from pathlib import Path

from datasets import load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hzero.tools.data.cluster import workers
from hzero.tools.data.prepare import prepare, settings_of

ROUNDS, LENGTH, SIZE = 3, 2048, 2000


def by_datasets(folder: Path, output: Path) -> None:
    """As in recipes of `datasets`: batches of 1,000 documents are packed, and the rest of each is dropped."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))

    def packed(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = tokenizer(rows["text"], add_special_tokens=False)["input_ids"]
        ids = [token for one in found for token in (*one, tokenizer.eos_token_id)]
        return {"input_ids": [ids[at : at + LENGTH] for at in range(0, len(ids) - LENGTH + 1, LENGTH)]}

    texts = load_dataset("json", data_dir=str(folder / "texts"), split="train", cache_dir=str(output))
    texts.map(packed, batched=True, remove_columns=["text"], num_proc=2)


def main() -> None:
    """Prints medians, and of each round's ratios to one worker the median."""
    with tempfile.TemporaryDirectory() as work, workers(1) as one, workers(2) as two:
        files = sorted(Path(json.__file__).parents[1].glob("[a-r]*/**/*.py"))  # the standard library's
        text = "".join(file.read_text(errors="replace") for file in files)
        lines = [text[at : at + SIZE] for at in range(0, len(text), SIZE)]
        Path(work, "texts").mkdir()
        Path(work, "texts", "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        made = ByteLevelBPETokenizer()
        made.train_from_iterator(lines[::10], vocab_size=16_000, special_tokens=["<end>"], show_progress=False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token="<end>")
        tokenizer.save_pretrained(f"{work}/tokenizer")
        keys = [f"data.path={work}/texts", f"tokenizer={work}/tokenizer", "data.shard_bytes=1_000_000"]
        names = ("hzero with 1 worker", "hzero with 2 workers", "datasets, num_proc=2")
        rates = {name: list[float]() for name in names}
        for pool in (one, two):  # starts its processes
            list(pool.map(abs, range(8)))
        for number in range(ROUNDS):
            for found, executor in zip(rates.values(), (one, two, None)):
                output, began = Path(work, f"{number}-{id(executor)}"), time.perf_counter()
                settings = settings_of([*keys, f"data.output={output}"])
                prepare(settings, executor) if executor else by_datasets(Path(work), output)
                found.append(len(lines) / (time.perf_counter() - began))
    for name, found in rates.items():
        ratio = statistics.median(rate / base for rate, base in zip(found, rates[names[0]]))
        print(f"{name:24}{statistics.median(found):10,.0f} documents/s{ratio:8.2f}")


if __name__ == "__main__":
    main()
