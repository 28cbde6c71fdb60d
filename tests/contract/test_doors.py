"""How the connector is loaded, what a package without connectors gets told, and callbacks that few releases call."""

from __future__ import annotations

import importlib
import shutil
import sys
import threading

import adversary
import pytest
import real
from adversary import forget
from generate import write

from kvtool.engine.trtllm.connector import MODULE, SETTINGS_ENV
from kvtool.errors import EngineRefused, Missing

OLD = "_torch/pyexecutor/kv_cache_connector.py"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of 1.2.1 of its own, to break."""
    write(tmp_path, "1.2.1")
    forget()
    yield tmp_path / "tensorrt_llm"
    forget()


def test_without_tensorrt_llm_the_module_says_so():
    forget()
    with pytest.raises(Missing, match="tensorrt_llm is not installed here"):
        importlib.import_module(MODULE)


def test_a_package_without_connectors_is_refused(package, monkeypatch):
    monkeypatch.syspath_prepend(str(package.parent))
    shutil.rmtree(package / "_torch")
    with pytest.raises(EngineRefused, match=r"1\.2\.1: no KV cache connectors in it"):
        importlib.import_module(MODULE)


def test_what_fails_inside_tensorrt_llm_is_not_taken_for_a_missing_module(package, monkeypatch):
    monkeypatch.syspath_prepend(str(package.parent))
    (package / OLD).write_text("import libcuda_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="libcuda_that_is_not_there"):
        importlib.import_module(MODULE)
    assert MODULE not in sys.modules


def file_of(setup, tmp_path, **more):
    return real.settings(tmp_path / "connector.yaml", setup.model, None, tp=1, stored=1, namespace="doors", **more)


def test_callbacks_of_later_releases_do_no_harm(trtllm, tmp_path):
    trtllm("1.4.0rc1")
    setup, requests = real.drawn(5, v2=False, count=4)

    class Asking(adversary.Work):
        def __call__(self, executor):
            worker, scheduler, request = executor.manager.worker, executor.manager.scheduler, adversary.fake("request")
            for state in executor.active:
                scheduler.cancel_load(request.LlmRequest(state), 0, 4)
                assert scheduler.try_abort_request(state.request_id, "timeout") is False
                assert scheduler.finalize_successful_load(state.request_id) is True
                assert worker.try_abort_request(state.request_id) is worker.abort_request(state.request_id) is False
            worker.finalize_finished_loads([], executor.stream)
            assert worker.take_failed_load_request_ids() == set()
            return super().__call__(executor)

    with real.environment(**{SETTINGS_ENV: str(file_of(setup, tmp_path))}):
        adversary.play(setup, Asking(1, requests), real.connector(), llm_args=real.llm_args(setup))


def test_a_listener_that_fails_once_goes_on_listening(tmp_path):
    from multiprocessing.connection import Client

    control = importlib.import_module("kvtool_trtllm.control")
    made = control.Control(str(tmp_path / "control.sock"), None, 1, {})
    listener, failed = made._listener, threading.Event()

    class Failing:
        address = listener.address
        close = listener.close

        def accept(self):
            if not failed.is_set():
                failed.set()
                raise OSError(24, "Too many open files")
            return listener.accept()

    made._listener = Failing()
    Client(listener.address).close()  # ends the accept that runs now
    assert failed.wait(5)
    Client(listener.address).close()
    made.close()
    assert not made._thread.is_alive()
