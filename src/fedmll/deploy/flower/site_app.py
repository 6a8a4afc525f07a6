"""The ClientApp: any method of the registry at a site. It keeps nothing between messages but what is on the site's disk
(and, where the process stays, the loaded data and model), so it runs on every Flower runtime. It trusts no message: who
it is from, what it is and what it says are checked, and what leaves is a reply of the method or a fixed sentence."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Error
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedmll.deploy.audit import HASH, Audit, described
from fedmll.deploy.flower.internals import SUPERLINK_NODE_ID, ErrorCode
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.sentences import LONGEST_TEXT, Refused, indented, plain, sentence
from fedmll.deploy.site_worker import Setup, SiteWorker, forget, recall_site
from fedmll.deploy.turned_away import advice
from fedmll.errors import FedmllError
from fedmll.message import Message

SITES = "FEDMLL_SITES"
HELLO, TRAIN, EVALUATE, MODEL, BYE = "query.hello", "train", "evaluate", "query.model", "query.bye"
KINDS = (HELLO, TRAIN, EVALUATE, MODEL, BYE)


class SiteApp(ClientApp):
    """Messages of the server's that it knows; the others are ignored, with a notice."""

    def __call__(self, message: FlowerMessage, context: Context) -> FlowerMessage:
        about, kind = message.metadata, message.metadata.message_type
        if about.src_node_id != SUPERLINK_NODE_ID or about.run_id != context.run_id:
            return _ignored(message, f"a message of node {about.src_node_id}, which is not the server of this run")
        if kind not in KINDS:
            return _ignored(message, f"a message of the unknown type '{kind}'")
        return super().__call__(message, context)


@dataclass
class Standing:
    """How the join that this process serves stands."""

    farewell: bool = False  # the server of the run that it takes part in said that it is over
    declined: str = ""  # why nobody approved
    worker: SiteWorker | None = None  # who has the model, from when it came
    complaint: str = ""  # the last error that was shown: a server that asks again and again gets no more lines


app = SiteApp()
standing = Standing()
Answer = tuple[Message, dict[str, Any]]

_told: list[str] = []  # refusals that were shown

_workers: dict[tuple[str, str], SiteWorker] = {}  # the newest only; by the site's file and the setup


def show(text: str) -> None:
    print(plain(text, LONGEST_TEXT), flush=True)


def show_details(text: str) -> None:
    print(indented(text), flush=True)


@app.query("hello")
def hello(message: FlowerMessage, context: Context) -> FlowerMessage:
    def work(file: Path, about: dict[str, Any], _: Message) -> Answer:
        refusal = advice(about.get("refused"))
        if refusal is not None and refusal not in _told:
            _told.append(refusal)
            show(refusal)
        return Message(), _worker(file, about).introduce()

    return _answer(message, context, work)


@app.train()
def train(message: FlowerMessage, context: Context) -> FlowerMessage:
    def work(file: Path, about: dict[str, Any], sent: Message) -> Answer:
        worker, begin = _worker(file, about), time.perf_counter()
        round, base, keep = _rounds(about, worker.learner.task.rounds)
        reply, remembers = worker.train(sent, round, base, keep)
        show(f"round {round}: loss {reply.numbers['loss']:.4g}, {time.perf_counter() - begin:.1f} s")
        return reply, {"memory": remembers}

    return _answer(message, context, work)


@app.evaluate()
def evaluate(message: FlowerMessage, context: Context) -> FlowerMessage:
    return _answer(message, context, lambda file, about, sent: (_worker(file, about).evaluate(sent), {}))


@app.query("model")
def model(message: FlowerMessage, context: Context) -> FlowerMessage:
    def work(file: Path, about: dict[str, Any], sent: Message) -> Answer:
        worker = _worker(file, about)
        show(f"the common model is in {worker.take(sent, about.get('digest')).file}")
        standing.worker = worker
        return Message(), {}

    return _answer(message, context, work)


@app.query("bye")
def bye(message: FlowerMessage, context: Context) -> FlowerMessage:
    def work(file: Path, about: dict[str, Any], _: Message) -> Answer:
        run = Setup.from_json(about.get("setup", "")).run
        known = {worker.run for worker in _workers.values()}
        if known and run not in known:  # without any, this process did not serve the run: a simulation's
            raise Refused("message", f"A farewell of the run '{run}', in which this site does not take part: ignored.")
        forget(recall_site(file), run)
        standing.farewell = True
        return Message(), {}

    return _answer(message, context, work)


def _answer(
    message: FlowerMessage, context: Context, work: Callable[[Path, dict[str, Any], Message], Answer]
) -> FlowerMessage:
    """Do it. An error is shown here in full; the server hears a sentence of a fixed list. What leaves is in the audit
    before it leaves."""
    name, audit, facts = "", None, {"kind": message.metadata.message_type}
    try:
        file = _site_file(context)
        site = recall_site(file)
        name, audit = site.name, Audit(site.memory)
        sent, about = from_records(message.content)
        reply, told = work(file, about, sent)
        audit.write("left", **facts, **_facts(about, told), **described(reply))
    except FedmllError as error:
        complain(f"error: {error}")
        reply, told = Message(), {"error": sentence(error)}
        if isinstance(error, Refused) and error.code == "approval":
            standing.declined = str(error)
    except Exception as error:
        complain(traceback.format_exc(), show_details)
        reply, told = Message(), {"error": sentence(error)}
    if "error" in told and audit is not None:
        with suppress(OSError):  # the disk is full, perhaps: what leaves is a sentence, and was shown
            audit.write("refused", **facts, text=told["error"])
    return FlowerMessage(to_records(reply, told | {"name": name}), reply_to=message)


def _facts(about: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """For the audit: which round, which words leave beside the numbers, how much data they say there is. And how the
    server's own audit ends: who would shorten that one must then change this one too."""
    facts = {"round": about["round"]} if "round" in about else {}
    facts |= {"words": sorted({*told, "name"})}
    facts |= {name: told[name] for name in ("samples", "held_out") if name in told}
    mark = about.get("audit")
    return facts | ({"server_audit": mark} if isinstance(mark, str) and HASH.fullmatch(mark) else {})


def complain(text: str, say: Callable[[str], None] = show) -> None:
    if text != standing.complaint:
        say(text)
    standing.complaint = text


def _ignored(message: FlowerMessage, what: str) -> FlowerMessage:
    complain(f"ignored: {plain(what, 200)}")
    return FlowerMessage(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "ignored"), reply_to=message)


def _rounds(about: dict[str, Any], last: int) -> tuple[int, int | None, list[int] | None]:
    """Which round is asked for, from the memory of which, and which memories to keep. Files are named after them."""
    round, base, keep = about.get("round"), about.get("base"), about.get("keep")
    kept = keep if isinstance(keep, list) else []
    numbers = [round, *([] if base is None else [base]), *kept]
    if not all(type(number) is int and 0 <= number <= last + 1 for number in numbers) or keep not in (None, kept):
        raise Refused("message", "The server's message does not say properly which round it is about.")
    assert isinstance(round, int)
    return round, base, keep


def _worker(file: Path, about: dict[str, Any]) -> SiteWorker:
    setup = about.get("setup")
    if not isinstance(setup, str):
        raise Refused("message", "The server's message does not say what it is about.")
    key = (file.read_text(), setup)
    if key not in _workers:
        _workers.clear()
        _workers[key] = SiteWorker(recall_site(file), Setup.from_json(setup), show)
    return _workers[key]


def _site_file(context: Context) -> Path:
    """The file that says where the site's data is: given to the node, or (a simulation) the n-th of a folder."""
    if "site" in context.node_config:
        return Path(str(context.node_config["site"]))
    sites = sorted(Path(str(context.run_config.get("sites") or os.environ[SITES])).glob("*.json"))
    return sites[int(context.node_config["partition-id"])]
