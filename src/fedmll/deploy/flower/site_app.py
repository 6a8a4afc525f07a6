"""The ClientApp: any method of the registry at a site. It keeps nothing between messages but what is on the site's disk
(and, where the process stays, the loaded data and model), so it runs on every Flower runtime."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.refusals import advice
from fedmll.deploy.site_worker import Setup, SiteWorker, recall_site
from fedmll.errors import DataError, FedmllError
from fedmll.message import Message

SITES = "FEDMLL_SITES"
HELLO, TRAIN, EVALUATE, BYE = "query.hello", "train", "evaluate", "query.bye"

app = ClientApp()
Answer = tuple[Message, dict[str, Any]]

_told: list[str] = []  # refusals that were shown

_workers: dict[tuple[str, str], SiteWorker] = {}  # the newest only; by the site's file and the setup


def show(text: str) -> None:
    print(text, flush=True)


@app.query("hello")
def hello(message: FlowerMessage, context: Context) -> FlowerMessage:
    def work(worker: SiteWorker, _: Message, about: dict[str, Any]) -> Answer:
        refusal = advice(about.get("refused"))
        if refusal is not None and refusal not in _told:
            _told.append(refusal)
            show(refusal)
        return Message(), worker.introduce()

    return _answer(message, context, work)


@app.train()
def train(message: FlowerMessage, context: Context) -> FlowerMessage:
    def work(worker: SiteWorker, sent: Message, about: dict[str, Any]) -> Answer:
        begin = time.perf_counter()
        reply, remembers = worker.train(sent, about["round"], about["base"], about["keep"])
        seconds = time.perf_counter() - begin
        show(f"round {about['round']}: loss {reply.numbers['loss']:.4g}, {seconds:.1f} s")
        return reply, {"memory": remembers}

    return _answer(message, context, work)


@app.evaluate()
def evaluate(message: FlowerMessage, context: Context) -> FlowerMessage:
    return _answer(message, context, lambda worker, sent, _: (Message({}, worker.evaluate(sent)), {}))


@app.query("bye")
def bye(message: FlowerMessage, context: Context) -> FlowerMessage:
    def work(worker: SiteWorker, _: Message, about: dict[str, Any]) -> Answer:
        worker.forget()
        return Message(), {}

    return _answer(message, context, work)


def _answer(
    message: FlowerMessage, context: Context, work: Callable[[SiteWorker, Message, dict[str, Any]], Answer]
) -> FlowerMessage:
    """Do it. An error is shown here in full, and to the server without the data: a file's name may be a patient's."""
    name = ""
    try:
        sent, about = from_records(message.content)
        file = _site_file(context)
        name = recall_site(file).name
        reply, told = work(_worker(file, about["setup"]), sent, about)
    except FedmllError as error:
        show(f"error: {error}")
        told = {"error": "its data cannot be used; it sees why" if isinstance(error, DataError) else str(error)}
        reply = Message()
    except Exception as error:
        show(traceback.format_exc())
        reply, told = Message(), {"error": f"an internal error ({type(error).__name__}); it sees the details"}
    return FlowerMessage(to_records(reply, told | {"name": name}), reply_to=message)


def _worker(file: Path, setup: str) -> SiteWorker:
    key = (file.read_text(), setup)
    if key not in _workers:
        _workers.clear()
        _workers[key] = SiteWorker(recall_site(file), Setup.from_json(setup))
    return _workers[key]


def _site_file(context: Context) -> Path:
    """The file that says where the site's data is: given to the node, or (a simulation) the n-th of a folder."""
    if "site" in context.node_config:
        return Path(str(context.node_config["site"]))
    sites = sorted(Path(str(context.run_config.get("sites") or os.environ[SITES])).glob("*.json"))
    return sites[int(context.node_config["partition-id"])]
