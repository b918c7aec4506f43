"""Tokenizers: trained here or brought along, the same for us and for transformers."""

import hashlib
import json
import logging
import os
import subprocess
import sys

import huggingface_hub
import pytest
import tokenizers
from huggingface_hub import errors
from tokenizers import AddedToken, models, pre_tokenizers, processors

from pico_train.data.sources import DataError, Document
from pico_train.data.tokenizer import END_OF_TEXT, Tokenizer

WORDS = ["def", "return", "self", "import", "hello", "world", "", "", "\n\t", "=", "(", "é", "日本"]
TRAINING = [Document(str(n), " ".join(WORDS[n % 7 :] * 5) + "\n") for n in range(40)]

TEXTS = [
    "plain words",
    "  two leading spaces, one trailing ",
    "    def f(self):\n\treturn 'don\\'t'\r\n\n\n",
    "é e\u0301 日本語 \u00a0 \u200b 😀 👩‍👩‍👧 \ufeff \x00 \x7f",
    "Hello , world ! it 's n't . [UNK] <s> </s>",
    f"before{END_OF_TEXT} after {END_OF_TEXT}",
    "",
    "ÅÄÖ ß ﬁ ½ ｆｕｌｌ",
]


@pytest.fixture(scope="module")
def trained():
    return Tokenizer.train(TRAINING, vocab_size=290)


def write_tokenizer(folder, tokenizer, config=None):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def write_llama_config(folder, vocab_size):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))


def word_level(*tokens, **options):
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, value in options.items():
        setattr(tokenizer, name, value)
    return tokenizer


# ---- trained


def test_training_gives_exactly_the_size_asked_for(trained):
    assert trained.size == 290
    assert trained.eos == trained.bos == END_OF_TEXT
    assert trained.eos_id == trained.bos_id == 0
    assert trained.token(0) == END_OF_TEXT
    assert trained.token(290) is None


def test_training_is_deterministic(trained):
    assert Tokenizer.train(iter(TRAINING), vocab_size=290).json == trained.json


def test_merges_are_learnt_from_the_text():
    zebra = Tokenizer.train([Document("a", "zebra zebra zebra")], vocab_size=300)
    assert [len(ids) for ids in zebra.encode_batch(["zebra", " zebra", "arbez"])] == [1, 1, 5]


def test_the_end_of_text_spelled_out_is_one_token_and_teaches_no_merges():
    spelled = Tokenizer.train([Document("a", f"x{END_OF_TEXT}" * 50)], vocab_size=300)
    assert spelled.size == 257
    assert spelled.encode_batch([f"x{END_OF_TEXT}"])[0][1:] == [spelled.eos_id]


def test_a_text_with_few_merges_gives_fewer_entries_and_a_note(caplog):
    with caplog.at_level(logging.WARNING, "pico_train.data"):
        tokenizer = Tokenizer.train([Document("a", "aaaa bbbb aaaa bbbb")], vocab_size=5000)
    assert 257 < tokenizer.size < 300
    assert f"{tokenizer.size} entries only, not the 5000" in caplog.text


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(DataError, match=r"data\.tokenizer\.vocab_size: 256 is too small .* at least 257"):
        Tokenizer.train(TRAINING, vocab_size=256)
    assert Tokenizer.train(TRAINING, vocab_size=257).size == 257


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(trained, text):
    ids = trained.encode_batch([text])[0]
    assert trained.decode(ids) == text
    assert all(0 <= number < trained.size for number in ids)


def test_a_batch_is_its_texts_one_by_one(trained):
    assert trained.encode_batch(TEXTS) == [trained.encode_batch([text])[0] for text in TEXTS]


# ---- transformers


def test_transformers_reads_a_checkpoint_folder_as_the_same_tokenizer(trained, tmp_path):
    from transformers import AutoTokenizer

    trained.write_files(tmp_path)
    write_llama_config(tmp_path, trained.size)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs.is_fast
    assert len(theirs) == trained.size
    assert (theirs.bos_token, theirs.eos_token) == (END_OF_TEXT, END_OF_TEXT)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (trained.bos_id, trained.eos_id)
    for text, ids in zip(TEXTS, trained.encode_batch(TEXTS), strict=True):
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == trained.decode(ids) == text


def test_transformers_reads_a_tokenizer_brought_along_as_we_do(trained, tmp_path):
    """One with other special tokens, a beginning that its post-processor adds, and added tokens."""
    from transformers import AutoTokenizer

    brought = tokenizers.Tokenizer.from_str(trained.json)
    brought.add_special_tokens(["<s>", "</s>"])
    brought.add_tokens([AddedToken("<added>")])
    begin, end = brought.token_to_id("<s>"), brought.token_to_id("</s>")
    brought.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    ours = Tokenizer.load(write_tokenizer(tmp_path / "brought", brought, config))
    assert (ours.bos_id, ours.eos_id, ours.size) == (begin, end, 293)

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    ours.write_files(folder)
    write_llama_config(folder, ours.size)
    theirs = AutoTokenizer.from_pretrained(str(folder))
    assert (theirs.bos_token_id, theirs.eos_token_id) == (begin, end)
    for text, ids in zip([*TEXTS, "x<added>"], ours.encode_batch([*TEXTS, "x<added>"]), strict=True):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids)


# ---- brought along


def test_written_files_read_back_as_the_same(trained, tmp_path):
    trained.write_files(tmp_path)
    again = Tokenizer.read_files(tmp_path)
    loaded = Tokenizer.load(str(tmp_path))
    assert again.hash == trained.hash == loaded.hash
    assert (again.eos_id, again.bos_id) == (trained.eos_id, trained.bos_id)


def test_the_hash_is_that_of_the_file(trained, tmp_path):
    trained.write_files(tmp_path)
    assert hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest() == trained.hash
    assert Tokenizer.train(TRAINING, vocab_size=289).hash != trained.hash


def test_size_counts_added_tokens_and_gaps():
    tokenizer = word_level("[UNK]", "a", "</s>")
    tokenizer.add_tokens(["new", "newer"])
    assert Tokenizer(tokenizer.to_str(), eos="</s>").size == 5
    gap = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 9}, unk_token="[UNK]"))
    assert Tokenizer(gap.to_str(), eos="</s>").size == 10


def test_no_document_is_cut_or_padded_by_what_a_file_says(tmp_path):
    tokenizer = word_level("[UNK]", "a", "</s>")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    loaded = Tokenizer.load(write_tokenizer(tmp_path / "t", tokenizer))
    assert loaded.encode_batch(["a a a", "a"]) == [[1, 1, 1], [1]]


def test_nothing_is_added_around_a_document(tmp_path):
    tokenizer = word_level(
        "[UNK]",
        "a",
        "</s>",
        post_processor=processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)]),
    )
    assert Tokenizer.load(write_tokenizer(tmp_path / "t", tokenizer)).encode_batch(["a"]) == [[1]]


def test_a_file_alone_is_searched_for_a_usual_end_of_text(tmp_path):
    folder = write_tokenizer(tmp_path / "t", word_level("[UNK]", "<s>", "</s>"))
    loaded = Tokenizer.load(os.path.join(folder, "tokenizer.json"))
    assert (loaded.eos, loaded.eos_id, loaded.bos_id) == ("</s>", 2, 2)


def test_a_hub_id_is_fetched(tmp_path, monkeypatch):
    folder = write_tokenizer(
        tmp_path / "t", word_level("[UNK]", "<b>", "<e>"), {"bos_token": "<b>", "eos_token": "<e>"}
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file: os.path.join(folder, file))
    loaded = Tokenizer.load("owner/name")
    assert (loaded.bos_id, loaded.eos_id) == (1, 2)


def test_a_hub_id_that_cannot_be_fetched_is_one_message(monkeypatch):
    def offline(repo, file):
        raise OSError("We cannot reach the Hub.\nMore lines.")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(DataError) as caught:
        Tokenizer.load("owner/name")
    assert str(caught.value) == (
        "data.tokenizer.name: 'owner/name' is no file or folder here, and as a Hub id it could not be fetched: "
        "We cannot reach the Hub. Give the path of a folder or tokenizer.json, or byte-level-bpe to train one"
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (errors.GatedRepoError, "its owner has to grant access first"),
        (errors.RepositoryNotFoundError, "the Hub has no such repository, or it is private"),
        (errors.RemoteEntryNotFoundError, "it has no tokenizer.json"),
        (errors.LocalEntryNotFoundError, "the Hub cannot be reached, and it is not in the cache"),
    ],
)
def test_why_a_hub_id_cannot_be_fetched_is_one_line_without_the_tries(kind, reason, monkeypatch, caplog):
    def failing(repo, file):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        error = kind.__new__(kind)
        error.args = ("404 Client Error. (Request ID: x)\n\nNot found for url",)
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", failing)
    with pytest.raises(DataError) as caught:
        Tokenizer.load("owner/name")
    assert f"as a Hub id it could not be fetched: {reason}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Retry" not in caplog.text
    logging.getLogger("huggingface_hub.utils._http").warning("heard again")
    assert "heard again" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "config", "problem"),
    [
        (["[UNK]", "a"], None, "no end-of-text token, .*none of <|endoftext|>"),
        (["[UNK]", "</s>"], {"bos_token": "</s>"}, "no end-of-text token, .*has no eos_token"),
        (["[UNK]", "</s>"], {"eos_token": "<gone>"}, "names the special token '<gone>'"),
        (["[UNK]", "</s>"], {"eos_token": "</s>", "bos_token": "<gone>"}, "names the special token '<gone>'"),
        (["[UNK]", "</s>"], ["eos_token"], "is not a JSON object"),
    ],
)
def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path, tokens, config, problem):
    folder = write_tokenizer(tmp_path / "t", word_level(*tokens), config)
    with pytest.raises(DataError, match=problem.replace("|", r"\|")):
        Tokenizer.load(folder)


def test_files_that_are_no_tokenizer_are_named(tmp_path):
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer\.json"):
        Tokenizer.load(str(tmp_path))
    write_tokenizer(tmp_path, word_level("[UNK]", "</s>"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not a readable JSON file"):
        Tokenizer.load(str(tmp_path))


def test_a_process_forked_after_encoding_says_nothing():
    script = (
        "import os\n"
        "from pico_train.data.sources import Document\n"
        "from pico_train.data.tokenizer import Tokenizer\n"
        "t = Tokenizer.train([Document('a', 'hello hello world ' * 9)], vocab_size=260)\n"
        "t.encode_batch(['hello'] * 100)\n"
        "os._exit(0) if os.fork() == 0 else os.wait()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    # Python 3.12 and newer warn of any fork beside threads; what is asked here is what the library says
    python = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    done = subprocess.run(python, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
