"""The packages' direction and the homes of heavy dependencies, read from the imports of every
module.
"""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foundation.settings import load_config
from pretrain.config.run import RunConfig
from pretrain.rundir.code_version import CODE_PACKAGES as VERSIONED_PACKAGES
from tests.helpers.checkout import ROOT

CODE_PACKAGES = ("foundation", "data_pipeline", "pretrain", "launcher")
MODULES = tuple(sorted(path for each in CODE_PACKAGES for path in (ROOT / each).rglob("*.py")))
MAY_IMPORT = {
    "foundation": {"foundation"},
    "data_pipeline": {"foundation", "data_pipeline"},
    "pretrain": {"foundation", "data_pipeline", "pretrain"},
    "launcher": {"foundation", "data_pipeline", "pretrain", "launcher"},
}
# Where a heavy dependency may be imported; a folder stands for all modules in it.
HOMES = {
    "deepspeed": ("pretrain/engines/deepspeed_engine.py",),
    "triton": ("pretrain/kernels/",),
    "streaming": ("data_pipeline/",),
    "webdataset": ("data_pipeline/",),
    "sentencepiece": (
        "data_pipeline/vocabularies/sentencepiece_model.py",
        "data_pipeline/builder/build_tokenizer.py",
        "pretrain/weights/huggingface/tokenization_xl_pretrain.py",  # runs in exports only
    ),
    "pyarrow": ("data_pipeline/builder/tables.py",),
    "tokenizers": ("data_pipeline/vocabularies/huggingface.py",),
    "tiktoken": ("data_pipeline/vocabularies/tiktoken_ranks.py",),
    "lm_eval": ("pretrain/evaluation/",),
    "transformers": (
        "pretrain/weights/huggingface/",
        "pretrain/model/transformers_modules.py",
    ),
    "wandb": ("pretrain/metrics/wandb_writer.py",),
    "torch.utils.tensorboard": ("pretrain/metrics/writers.py",),
    "torch": ("pretrain/",),
}
EXPERIMENTS = sorted((ROOT / "configs" / "experiments").glob("*.yaml")) + sorted(
    (ROOT / "configs" / "models").glob("*.yaml")
)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[str]:
    """Every module named in an import statement, those inside functions included."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports relatively"
            yield node.module


def test_imports_go_in_one_direction_and_to_their_homes():
    for path in MODULES:
        name = str(path.relative_to(ROOT))
        for imported in imports_of(path):
            first = imported.split(".")[0]
            assert first not in ("benchmarks", "tests"), f"{name} imports {imported}"
            if first in CODE_PACKAGES:
                assert first in MAY_IMPORT[name.split("/")[0]], f"{name} imports {imported}"
            for dependency, homes in HOMES.items():
                if imported == dependency or imported.startswith(dependency + "."):
                    assert name.startswith(homes), f"{name} imports {imported}, not in {homes}"


# They unpickle, and with that execute, what a file or another process says. Workers of one build
# talk through pipes that nobody else can open.
UNPICKLERS = {
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"),
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}


def test_nothing_that_others_send_or_write_is_unpickled():
    for path in MODULES:
        assert list(unpickling(tree_of(path))) == [], path
        assert UNPICKLERS.isdisjoint(imports_of(path)), path


def unpickling(tree: ast.Module) -> Iterator[str]:
    """What in this code could unpickle, with its line."""
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, (ast.Call, ast.ImportFrom)) else ""
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if (
            name in UNPICKLERS
            or (text.startswith("torch.load(") and "weights_only=True" not in text)
            or (isinstance(node, ast.ImportFrom) and _imports_load(node))
            or (isinstance(node, ast.Call) and any(map(_allows_pickles, node.keywords)))
        ):
            yield f"line {getattr(node, 'lineno', 0)}: {text or name}"


def _imports_load(node: ast.ImportFrom) -> bool:
    """Whether `load` of torch or numpy would get a name of its own, which calls do not show."""
    roots = ("torch", "torch.serialization", "numpy", "numpy.lib.npyio")
    return node.module in roots and any(alias.name in ("load", "*") for alias in node.names)


def _allows_pickles(keyword: ast.keyword) -> bool:
    return keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("np.load(file, allow_pickle=True)", True),
        ("np.load(file, allow_pickle=flag)", True),
        ("np.load(file, allow_pickle=False)", False),
        ("from torch import load", True),
        ("from numpy import load as read", True),
        ("torch.load(file)", True),
        ("torch.load(file, weights_only=True)", False),
        ("dist.all_gather_object(x)", True),
    ],
)
def test_the_rule_sees_what_unpickles(code, is_found):
    assert bool(list(unpickling(ast.parse(code)))) == is_found


def test_the_working_directory_is_changed_only_around_the_start_of_a_fork_server():
    changing = {
        path.relative_to(ROOT).as_posix()
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if getattr(node, "attr", getattr(node, "name", "")) in ("chdir", "fchdir")
    }
    assert changing == {"data_pipeline/builder/parallel_build.py"}, (
        "relative paths mean others meanwhile"
    )


# Objects of ours that have a method `read`.
READ_OF_OURS = ("self", "ledger", "_publication")


def reads_without_limit(tree: ast.Module) -> Iterator[str]:
    """Whatever reads all of a file, or a line of any length, with its line number."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, owner = node.func.attr, ast.unparse(node.func.value)
            if (
                (name in ("read_text", "read_bytes", "readall"))
                or (name == "load" and owner == "json")
                or (name == "readlines" and not owner.startswith("io.BytesIO("))
                or (
                    (name in ("read", "read1", "readline") and not node.args)
                    and owner.rpartition(".")[2] not in READ_OF_OURS
                )
            ):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_nothing_is_read_whole_without_a_limit():
    """Use read_text, read_json, end_of and lines_of of foundation/files.py."""
    found = [f"{path}, {each}" for path in MODULES for each in reads_without_limit(tree_of(path))]
    assert found == []


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("path.read_text()", True),
        ("(folder / name).read_bytes()", True),
        ("json.load(file)", True),
        ("sys.stdin.buffer.read()", True),
        ("file.readline()", True),
        ("read_text(path)", False),
        ("file.read(size)", False),
        ("run_dir.ledger.read()", False),
    ],
)
def test_the_rule_sees_reads_without_a_limit(code, is_found):
    assert bool(list(reads_without_limit(ast.parse(code)))) == is_found


def test_json_without_nan_is_made_in_one_place():
    """Messages between ranks and ids in lines for people are no files."""
    others = (
        "foundation/typed_values.py",
        "foundation/errors.py",
        "pretrain/distributed/collectives.py",
    )
    makers = [path for path in MODULES if re.search(r"json\.dumps?\(", path.read_text())]
    assert sorted(str(path.relative_to(ROOT)) for path in makers) == sorted(others)


def test_the_version_of_the_code_covers_all_packages_that_a_rank_runs():
    assert set(VERSIONED_PACKAGES) == {"pretrain", *MAY_IMPORT["pretrain"]}


# Functions that write to disk besides the doors in foundation/files.py, and why what they write may
# be lost, half there or under its old name after a power failure.
DOORS = ("foundation/files.py", "foundation/locks.py")
MAY_BE_LOST = {
    # synced by what follows in the same place
    "data_pipeline/builder/build_corpus.py:_write_splits": "rejects: synced, then moved",
    "data_pipeline/corpora/stores.py:download": "what arrives: synced and moved by fetch_once",
    "launcher/slurm/sbatch.py:take_code": "the job's code: sync_tree",
    "pretrain/checkpoint/disk.py:prepare": "a save in progress: named by publish",
    "pretrain/checkpoint/disk.py:write_file": "a rank's file: synced there",
    "pretrain/rundir/restore.py:restore_run": "what arrives: moved, then removed",
    "pretrain/checkpoint/object_store.py:read_index": "what arrives: moved by restore",
    "pretrain/rundir/branch.py:begin_branch": "a branch: sync_tree, then moved",
    "pretrain/weights/export.py:write_weights": "weights: synced there",
    "pretrain/weights/adopted.py:write_back": "an export: new_directory syncs and moves it",
    # temporary: removed by its writer, or by the next one
    "data_pipeline/corpora/writable_store.py:_upload": "links for an upload",
    "data_pipeline/corpora/shard_cache.py:_reserve": "room for a download",
    "launcher/commands/preflight.py:run": "a check",
    "launcher/commands/preflight.py:_step": "a check",
    "launcher/commands/preflight.py:_lead": "a check",
    "pretrain/checkpoint/mirror.py:publish": "copies for an upload",
    "pretrain/checkpoint/retention.py:discard_partial": "a save that was given up",
    "pretrain/checkpoint/retention.py:_removed": "nothing: a lock",
    "pretrain/checkpoint/resume_point.py:_list_store": "what arrives: moved by bring",
    "pretrain/processes/node_check.py:disk_rate": "a check",
    "pretrain/processes/node_check.py:measure": "/dev/null",
    "pretrain/rundir/run_dir.py:check_writable": "a check",
    # nothing decides by them
    "launcher/slurm/srun.py:__init__": "a log",
    "launcher/slurm/task.py:main": "a log",
    "launcher/slurm/task.py:write_status": "a folder of logs",
    "launcher/slurm/job_exit.py:_end": "a folder of logs",
    "pretrain/metrics/writers.py:_start": "TensorBoard, a copy of metrics.jsonl",
    "pretrain/metrics/writers.py:close": "a profiler trace",
    "pretrain/processes/local_ranks.py:_start": "logs",
    "pretrain/rundir/heartbeat.py:_write": "signs of life of a start",
    "pretrain/rundir/watchdog.py:become": "/dev/null",
    # code that runs elsewhere
    "foundation/programs.py:make_startable": "of a snapshot: sync_tree",
    "pretrain/weights/huggingface/tokenization_xl_pretrain.py:save_vocabulary": "in transformers",
}
_WRITERS = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "rename", "renames", "touch"),
    *("symlink", "symlink_to", "link", "hardlink_to"),
    *("save_file", "tofile", "export_chrome_trace"),
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_WRITING_MODE = re.compile(r"[rb]*[wax+][wbxt+]*")


def test_a_power_failure_can_take_nothing_that_is_not_named_here():
    writers = {
        f"{path.relative_to(ROOT)}:{function}"
        for path in MODULES
        if str(path.relative_to(ROOT)) not in DOORS
        for function in writing_functions(tree_of(path))
    }
    assert writers == set(MAY_BE_LOST)


def writing_functions(tree: ast.Module) -> Iterator[str]:
    """The innermost functions in which something is written without `foundation.files`."""
    for node in (tree, *(node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))):
        if any(map(_writes, _calls_of(node))):
            yield getattr(node, "name", "module")


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("open(path, 'w')", True),
        ("open(path, mode='ab')", True),
        ("path.open('x')", True),
        ("open(path)", False),
        ("open(path, 'rb')", False),
        ("os.open(path, os.O_RDWR | os.O_CREAT)", True),
        ("path.write_text(text)", True),
        ("write_text(path, text)", False),
        ("path.replace(target)", True),
        ("text.replace('a', 'b')", False),
        ("replace(config, output=path)", False),
        ("os.replace(path, target)", True),
        ("shutil.copytree(path, target)", True),
        ("values.copy()", False),
        ("path.mkdir()", True),
    ],
)
def test_the_rule_sees_what_writes(code, is_found):
    assert bool(list(writing_functions(ast.parse(code)))) == is_found


def _calls_of(node: ast.AST) -> Iterator[ast.Call]:
    """The calls in a function, without those in functions within it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _FUNCTIONS):
            if isinstance(child, ast.Call):
                yield child
            yield from _calls_of(child)


def _writes(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
    of = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    arguments = [ast.unparse(each) for each in (*call.args, *(k.value for k in call.keywords))]
    match name:
        case "replace":  # str.replace takes two, dataclasses.replace is no method
            return of == "os" or (bool(of) and len(arguments) == 1)
        case "copy" | "copy2" | "copyfile" | "copytree" | "move":
            return of == "shutil"
        case "open" | "fdopen" if of == "os":
            return any("O_CREAT" in each or "O_WRONLY" in each for each in arguments)
        case "open":
            modes = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)]
            return any(isinstance(m, str) and _WRITING_MODE.fullmatch(m) for m in modes)
        case "write_text" if not of:  # that of foundation.files
            return False
        case _:
            return name in _WRITERS


def test_own_programs_are_started_without_the_working_directory_on_their_path():
    """`python -m` runs what lies there."""
    for path in (path for path in MODULES if '"-m"' in path.read_text()):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.List, ast.Tuple)):
                words = [each.value for each in node.elts if isinstance(each, ast.Constant)]
                assert "-m" not in words, f"{path}, line {node.lineno}: use own_command"


def test_the_folders_of_unit_tests_are_those_of_the_packages():
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.glob("*/**/test_*.py")}
    assert [folder for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []
    for package in ("data_pipeline", "pretrain", "launcher"):
        for path in (unit / package).glob("test_*.py"):
            assert (ROOT / package / path.name.removeprefix("test_")).is_file(), path


BENCHMARKS = tuple(sorted((ROOT / "benchmarks").rglob("*.py")))


def test_benchmarks_import_each_other_in_no_circle_and_stay_readable():
    assert cycles(module_graph(BENCHMARKS)) == []
    assert all(len(path.read_text().splitlines()) <= 400 for path in BENCHMARKS)


def test_the_rule_sees_imports_inside_functions(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("def f():\n    import torch.nn\n    from deepspeed import x\n")
    assert list(imports_of(path)) == ["torch.nn", "deepspeed"]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@functools.cache
def module_graph(paths: tuple[Path, ...]) -> dict[str, set[str]]:
    """module -> modules among `paths` that it imports anywhere: in functions and under
    TYPE_CHECKING too.
    """
    names = set(map(name_of, paths))
    graph: dict[str, set[str]] = {}
    for path in paths:
        name = name_of(path)
        graph[name] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & names
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & names
                graph[name] |= inner or ({node.module} & names)
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """What is left of a graph after nodes without arrows out, or in, have been taken away again and
    again.
    """
    graph = {node: set(targets) - {node} for node, targets in graph.items()}
    while True:
        reached = set().union(*graph.values())
        kept = {node for node in graph if graph[node] & graph.keys() and node in reached}
        if kept == graph.keys():
            return [sorted(kept)] if kept else []
        graph = {node: graph[node] & kept for node in kept}


def folder_of(module: str) -> str:
    """`pretrain.model` for `pretrain.model.layer`; a module atop a package stands for itself."""
    return ".".join(module.split(".")[:2])


def test_no_modules_import_each_other_in_a_circle():
    assert cycles(module_graph(MODULES)) == []


def test_no_folders_import_each_other_in_a_circle():
    folders: dict[str, set[str]] = {}
    for module, targets in module_graph(MODULES).items():
        folders.setdefault(folder_of(module), set()).update(map(folder_of, targets))
    assert cycles(folders) == []


def test_a_circle_would_be_seen():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert cycles(graph) == [["b", "c"]]
    assert cycles({"a": {"b"}, "b": set()}) == []


# The floors of docs/design.md, from the top; an import goes down, or stays on its floor.
FLOORS = (
    {"__main__"},
    {"cli"},
    {"commands"},
    {"run", "scaling", "sweeps", "comparisons"},
    {"train", "evaluation", "reporting"},
    {"processes", "recovery", "metrics", "weights"},
    {"rundir"},
    {"checkpoint"},
    {"state"},
    {"engines"},
    {"mixers"},
    {"optim", "model", "costs"},
    {"distributed", "config", "kernels", "terminal"},
    {"errors"},
)


def test_no_import_of_pretrain_goes_up_a_floor():
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    graph = module_graph(tuple(path for path in MODULES if path.is_relative_to(ROOT / "pretrain")))
    for module, targets in graph.items():
        for target in targets - {"pretrain.__init__"}:
            if module == "pretrain.__init__":
                continue
            above, below = module.split(".")[1], target.split(".")[1]
            assert floor[above] <= floor[below], f"{module} imports {target}, a floor above it"


def test_every_folder_says_what_it_is_for():
    for folder in {path.parent for path in MODULES}:
        assert ast.get_docstring(tree_of(folder / "__init__.py")), folder


def test_the_top_level_of_pretrain_stays_small():
    entries = [path for path in (ROOT / "pretrain").iterdir() if path.name != "__pycache__"]
    assert len([path for path in entries if path.is_dir()]) <= 21
    assert len([path for path in entries if path.suffix == ".py"]) <= 7


@pytest.mark.parametrize("package", ["foundation", "data_pipeline", "launcher"])
def test_a_torch_free_package_imports_no_torch_by_detours_either(package):
    paths = [path for path in MODULES if path.is_relative_to(ROOT / package)]
    modules = [name_of(path) for path in paths if not path.name.startswith("__")]
    code = (
        f"import importlib as i, sys\nfor name in {modules!r}: i.import_module(name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_experiment_and_model_file_is_valid():
    for path in EXPERIMENTS:
        assert load_config(RunConfig, path).model.num_layers > 1, path


def test_no_module_outgrows_what_one_reads_in_a_sitting():
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= 800, path


def test_no_file_has_the_marks_of_a_merge_that_nobody_finished():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\0")[:-1] or map(str, MODULES)
    for path in (ROOT / name for name in names if (ROOT / name).is_file()):
        assert not re.search(rb"^(<{7}|>{7}) ", path.read_bytes(), re.MULTILINE), path


def numbers(text: str) -> set[str]:
    """Return the numbers of a page as they are written, outside of code and addresses of links."""
    words = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    return set(re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?:e-?\d+)?", words))


def rounds_to(measured: str, shown: str) -> bool:
    digits = len(shown.partition(".")[2])
    return measured == shown or ("e" not in shown and f"{float(measured):.{digits}f}" == shown)


def test_the_readme_shows_committed_measurements_only():
    lines = (ROOT / "benchmarks" / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    for result in results:
        if "page" in result:
            missing = set(result["values"].values()) - numbers((ROOT / result["page"]).read_text())
            assert not missing, f"{result['page']} lacks {missing} of {result['claim']!r}"
    table = (ROOT / "README.md").read_text().partition("\n|---|---|---|\n")[2].partition("\n\n")[0]
    claims = set()
    for row in table.splitlines():
        claim, text, date = map(str.strip, row.strip("|").split("|"))
        claims.add(claim)
        own = [result for result in results if result["claim"] == claim]
        measured = {value for result in own for value in result["values"].values()}
        shown = numbers(f"{claim} {text}")
        wrong = {each for each in shown if not any(rounds_to(value, each) for value in measured)}
        unused = {value for value in measured if not any(rounds_to(value, each) for each in shown)}
        assert not wrong | unused, f"{claim}: not measured {wrong}, not shown {unused}"
        assert not own or date == max(result["date"] for result in own), claim
    assert claims >= {result["claim"] for result in results}
