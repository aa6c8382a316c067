"""Weights for servers elsewhere: bit-equal after many versions, small, and never a mixture, whatever gets lost on the way."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_zeropp.rollouts.versions import UpdateReceiver, UpdateSender, log
from hf_zeropp.rollouts.versions.log import LIST, DamagedUpdateError, Log

pytestmark = pytest.mark.one_rank

Weights = dict[str, torch.Tensor]


class Trainer:
    """bf16 weights of fp32 masters that AdamW moves, and some that hold what arithmetic would not keep."""

    def __init__(self, rate: float = 1e-5, num: int = 30_000) -> None:
        generator = torch.Generator().manual_seed(0)
        self.masters = [torch.nn.Parameter(torch.randn(size, generator=generator) * 0.02) for size in (num, 333, 1)]
        self.optimizer = torch.optim.AdamW(self.masters, lr=rate)
        self.generator = generator
        self.odd = torch.tensor([float("nan"), -0.0, 1e-40, float("inf")], dtype=torch.bfloat16)
        self.zero = torch.zeros(5, dtype=torch.bfloat16)

    def step(self) -> Weights:
        for master in self.masters:
            master.grad = torch.randn(master.shape, generator=self.generator)
        self.optimizer.step()
        self.odd, self.zero = self.odd.roll(1), -self.zero
        weights = {f"layer.{i}": master.detach().bfloat16() for i, master in enumerate(self.masters)}
        others = {"odd": self.odd, "zero": self.zero, "same": torch.ones(7), "none": torch.ones(0)}
        return weights | others | {"fp32": self.masters[1].detach().clone()}


def same(ours: Weights, theirs: Weights) -> bool:
    """Whether both hold the same bits. (``torch.equal`` knows no NaN.)"""
    return ours.keys() == theirs.keys() and all(log.checksum(ours[name]) == log.checksum(theirs[name]) for name in ours)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_receivers_are_bit_equal_after_200_versions(tmp_path):
    trainer, sender = Trainer(), UpdateSender(tmp_path)
    with served(tmp_path) as url:
        every, seventh = UpdateReceiver(url), UpdateReceiver(tmp_path)
        for version in range(1, 201):
            weights = trainer.step()
            assert sender.publish(weights.items()) == version
            assert every.update() and every.version == version and same(every.weights, weights)
            if version % 7 == 0:
                assert seventh.update() and seventh.version == version and same(seventh.weights, weights)
        late = UpdateReceiver(url)
        assert late.update() and same(late.weights, weights)
        assert not late.update() and not every.update()
    # The log holds two whole copies of 83 kB and their changes at most: it does not grow with the versions.
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 5 * 83_000
    assert {file.name for file in tmp_path.iterdir()} == {LIST, *(file.name for file in sender.log.files)}
    (tmp_path / "plain").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1, "others may read the files"


@pytest.fixture
def published(tmp_path) -> tuple[UpdateSender, UpdateReceiver, list[Weights]]:
    """Six versions, of which the receiver has two. ``whole-1`` is the only whole copy."""
    trainer, sender, receiver = Trainer(), UpdateSender(tmp_path), UpdateReceiver(tmp_path)
    versions: list[Weights] = [{}]
    for _ in range(6):
        versions.append(trainer.step())
        sender.publish(versions[-1].items())
        if sender.log.version == 2:
            receiver.update()
    assert [file.name for file in sender.log.files] == ["whole-1.safetensors"] + [
        f"changes-{version}.safetensors" for version in range(2, 7)
    ]
    return sender, receiver, versions


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1 << 3
    path.write_bytes(content)


def put_whole_copy(sender: UpdateSender, weights: Weights) -> None:
    """Publish a version that has a whole copy beside its changes."""
    sender._needs_whole = lambda new: True
    sender.publish(weights.items())


@pytest.mark.parametrize("place", [0.0, 0.0005, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("name", ["changes-4", "whole-1"])
def test_a_flipped_bit_is_refused_and_mended(published, tmp_path, name, place):
    sender, receiver, versions = published
    if name == "whole-1":
        receiver = UpdateReceiver(tmp_path)
    path, before = tmp_path / f"{name}.safetensors", dict(receiver.weights)
    good = path.read_bytes()
    flip(path, place)
    with pytest.raises(DamagedUpdateError, match=path.name):
        receiver.update()
    assert same(receiver.weights, before) and receiver.version == (2 if before else 0)
    path.write_bytes(good)
    assert receiver.update() and same(receiver.weights, versions[6])
    flip(path, place)
    put_whole_copy(sender, versions[3])
    assert receiver.update() and same(receiver.weights, versions[3])
    if name != "whole-1":
        fresh = UpdateReceiver(tmp_path)
        assert fresh.update() and same(fresh.weights, versions[3])


def swap_with_the_next(path: Path) -> None:
    other = path.with_name("changes-4.safetensors")
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


HARMS = {
    "lost": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "empty": lambda path: path.write_bytes(b""),
    "swapped": swap_with_the_next,
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_what_is_lost_cut_or_reordered_is_passed_over_for_a_whole_copy(published, tmp_path, harm, caplog):
    sender, receiver, versions = published
    harm(tmp_path / "changes-3.safetensors")
    with pytest.raises(DamagedUpdateError, match=r"changes-3.safetensors"):
        receiver.update()
    assert receiver.version == 2 and same(receiver.weights, versions[2])
    put_whole_copy(sender, versions[5])
    assert receiver.update() and receiver.version == 7 and same(receiver.weights, versions[5])
    assert "Version 2 stays" in caplog.text


def test_a_version_that_is_named_is_taken_and_no_other(published):
    sender, receiver, versions = published
    assert receiver.update(4) and receiver.version == 4 and same(receiver.weights, versions[4])
    assert not receiver.update(3) and receiver.version == 4
    with pytest.raises(DamagedUpdateError, match="no files that make version 7"):
        receiver.update(7)
    with pytest.raises(ValueError, match="from 1 on, got 0"):
        receiver.update(0)
    assert receiver.update() and same(receiver.weights, versions[6])


def test_an_update_that_breaks_off_leaves_the_old_version_and_can_be_repeated(published):
    sender, receiver, versions = published
    read, calls = receiver._read, []

    def break_off(name: str, max_bytes: int) -> bytes:
        calls.append(name)
        if name.startswith("changes-5"):
            raise KeyboardInterrupt  # no error that the receiver would answer
        return read(name, max_bytes)

    receiver._read = break_off
    with pytest.raises(KeyboardInterrupt):
        receiver.update()
    assert calls == [LIST, *(f"changes-{version}.safetensors" for version in (3, 4, 5))]
    assert receiver.version == 2 and same(receiver.weights, versions[2])
    receiver._read = read
    assert receiver.update() and same(receiver.weights, versions[6])


def test_a_trainer_that_dies_between_a_file_and_the_list_goes_on(published, tmp_path):
    sender, receiver, versions = published
    sender._list = lambda log: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        sender.publish(versions[1].items())
    assert (tmp_path / "changes-7.safetensors").exists()
    receiver.update()
    assert receiver.version == 6 and same(receiver.weights, versions[6])
    (tmp_path / ".partial-changes-8.safetensors-x").mkdir()  # of a writer that was killed
    resumed = UpdateSender(tmp_path)
    assert not list(tmp_path.glob(".partial-*"))
    assert resumed.publish(versions[3].items()) == 7
    assert receiver.update() and receiver.version == 7 and same(receiver.weights, versions[3])
    assert resumed.publish(versions[4].items()) == 8
    assert receiver.update() and same(receiver.weights, versions[4])


def test_a_log_that_was_made_anew_is_taken_whole(published, tmp_path):
    sender, receiver, versions = published
    for path in tmp_path.iterdir():
        path.unlink()
    anew = UpdateSender(tmp_path)
    for version in (5, 4):
        anew.publish(versions[version].items())
    assert receiver.update() and receiver.version == 2 and same(receiver.weights, versions[4])


def test_other_weights_are_sent_whole(published):
    sender, receiver, versions = published
    for other in (
        versions[6] | {"new": torch.ones(3)},
        {"odd": torch.ones(5, dtype=torch.bfloat16)},
        {"odd": torch.ones(5)},
    ):
        sender.publish(other.items())
        assert receiver.update() and same(receiver.weights, other)


def test_a_server_never_sees_a_mixture(tmp_path):
    """A thread reads while another updates: all weights it sees together carry one number."""
    sender, receiver = UpdateSender(tmp_path), UpdateReceiver(tmp_path)
    seen, stop = set(), threading.Event()

    def serve() -> None:
        while not stop.is_set():
            weights = receiver.weights
            seen.add(frozenset(float(each[0]) for each in weights.values()))

    thread = threading.Thread(target=serve)
    thread.start()
    for number in range(1, 40):
        sender.publish((f"weight.{i}", torch.full((5000,), number, dtype=torch.bfloat16)) for i in range(8))
        receiver.update()
    stop.set()
    thread.join()
    assert len(seen) > 5 and all(len(numbers) <= 1 for numbers in seen)


@pytest.mark.parametrize(
    "harm",
    [
        lambda fields: fields["files"][1].update(name="../secret"),
        lambda fields: fields["files"][1].update(name="/etc/passwd"),
        lambda fields: fields["files"][1].update(version=True),
        lambda fields: fields["files"][1].update(base=7),
        lambda fields: fields["files"][1].update(num_bytes=-1),
        lambda fields: fields["files"][1].update(num_bytes=10),
        lambda fields: fields["files"][1].update(more=1),
        lambda fields: fields["files"].reverse(),
        lambda fields: fields["files"].pop(0),
        lambda fields: fields.update(files=3),
        lambda fields: fields.update(run=[]),
        lambda fields: fields.clear(),
        *("", "[]", "{", "null", "[" * 100_000, "x" * 2_000_000),
    ],
    ids=lambda harm: harm[:4] if isinstance(harm, str) else None,
)
def test_a_list_that_somebody_else_wrote_is_refused(published, tmp_path, harm):
    if isinstance(harm, str):
        text = harm
    else:
        fields = json.loads((tmp_path / LIST).read_text())
        harm(fields)
        text = json.dumps(fields)
    (tmp_path / LIST).write_text(text)
    receiver = UpdateReceiver(tmp_path)
    with pytest.raises(DamagedUpdateError):
        receiver.update()
    assert receiver.weights == {}


def test_a_server_that_is_gone_is_an_error_that_names_it():
    with pytest.raises(DamagedUpdateError, match=r"http://127.0.0.1:9/log/updates.json cannot be read"):
        UpdateReceiver("http://127.0.0.1:9/log").update()


@pytest.mark.parametrize("fails", ["_write", "_list"])
def test_a_version_that_could_not_be_written_is_in_no_later_one(published, tmp_path, fails):
    """The disk was full. The next version is whole, because no server has the version that it would be a change of."""
    sender, receiver, versions = published
    receiver.update()
    working = getattr(sender, fails)

    def full(*args):
        setattr(sender, fails, working)
        raise OSError("no space left on device")

    setattr(sender, fails, full)
    with pytest.raises(OSError, match="no space"):
        sender.publish(versions[1].items())
    sender.publish(versions[1].items())
    for reader in (receiver, UpdateReceiver(tmp_path)):
        assert reader.update() and same(reader.weights, versions[1])
    sender.publish(versions[2].items())
    assert receiver.update() and same(receiver.weights, versions[2])
    assert {path.name for path in tmp_path.iterdir()} == {LIST, *(file.name for file in sender.log.files)}


def test_an_iteration_that_raises_leaves_the_log_as_it_was(published, tmp_path):
    sender, receiver, versions = published
    with pytest.raises(ZeroDivisionError):
        sender.publish((name, weight) for name, weight in versions[1].items() if 1 // (name != list(versions[1])[-1]))
    sender.publish(versions[2].items())
    assert sender.log.files[-1].base == 6
    assert receiver.update() and same(receiver.weights, versions[2])


def test_a_list_that_was_set_back_takes_nothing_back_and_makes_no_mixture(published, tmp_path):
    """From a snapshot, or a slow file system: a run that resumes goes on from older numbers than readers have."""
    sender, receiver, versions = published
    receiver.update()
    current = (tmp_path / LIST).read_text()
    for text in (Log(sender.log.run, sender.log.files[:3]).to_json(), current):
        (tmp_path / LIST).write_text(text)
        assert not receiver.update() and receiver.version == 6 and same(receiver.weights, versions[6])
    (tmp_path / LIST).write_text(Log(sender.log.run, sender.log.files[:-1]).to_json())
    resumed = UpdateSender(tmp_path)
    for index in (3, 1):
        resumed.publish(versions[index].items())
        assert receiver.update() and same(receiver.weights, versions[index])
