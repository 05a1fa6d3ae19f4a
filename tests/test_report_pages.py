"""A report's tables in every format, the paper's values, the page, and the command line."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from report_runs import make_run

from fedspa.core.errors import UserError
from fedspa.core.options import read_options
from fedspa.core.paths import project_root
from fedspa.report import tables
from fedspa.report.options import Options
from fedspa.report.page import Report, make_report, render, results, write_report
from fedspa.report.paper import paper_tables, printed, printed_values
from fedspa.report.runs import folders_under, read_runs
from fedspa.report.study import Row, Setting, Study, make_study
from fedspa.report.table import Cell, Column, Table


def study_of(root: Path) -> Study:
    return make_study("small", read_runs(folders_under(root)))


def found(study: Study, beginning: str, targets: Sequence[float] = ()) -> list[Table]:
    """The tables of a study whose names begin so."""
    return [table for table in tables.all_tables(study, targets) if table.name.startswith(beginning)]


def numbers(study: Study) -> list[dict[str, str]]:
    """The rows of results.csv."""
    text = results(study, tables.all_tables(study)).to_csv(index=False)
    return list(csv.DictReader(text.splitlines()))


@pytest.fixture
def small(tmp_path: Path) -> Study:
    """DST with two seeds and FedAvg with both on Dirichlet 0.3; on IID only FedAvg, with one seed."""
    dst = {"traffic": 3e6, "flops": 2e9}
    make_run(tmp_path / "d0", {"global": [40, 60], "personal": [50, 71], "local": [72, 80]}, seed=0, **dst)
    make_run(
        tmp_path / "d1",
        {"global": [40, 62], "personal": [50, 69], "local": [60, 82]},
        seed=1,
        trained=3,
        **dst,
    )
    dense = {"method": "fedavg", "mask": "none", "sparsity": 0.0, "traffic": 6e6, "flops": 4e9}
    make_run(tmp_path / "f0", {"global": [60, 70], "local": [60, 81.04]}, seed=0, **dense)
    make_run(tmp_path / "f1", {"global": [60, 74], "local": [60, 81]}, seed=1, **dense)
    make_run(tmp_path / "f%20i", {"global": [60, 90], "local": [60, 91]}, partition={"name": "iid"}, **dense)
    return study_of(tmp_path)


def texts(table: Table) -> dict[str, list[str]]:
    return {row.label: [cell.text for cell in cells] for row, cells in table.lines.items()}


# Tables


def test_the_main_table_shows_every_kind_and_what_is_missing(small: Study) -> None:
    [table] = found(small, "main")
    kinds = ["global, %", "personal, %", "local, %", "traffic, MB", "FLOPs, 1e9"]
    assert [(column.group, column.name) for column in table.columns] == [
        (group, name) for group in ("IID", "Dirichlet 0.3") for name in kinds
    ]
    assert texts(table) == {
        "FedSpa (DST)": ["missing"] * 5
        + ["61.0 \u00b1 1.0", "70.0 \u00b1 1.0", "81.0 \u00b1 1.0 (3/4)", "3.0", "2.0"],
        "FedAvg": ["90.0 [1 seed]", "\u2013", "91.0 [1 seed]", "6.0 [1 seed]", "4.0 [1 seed]"]
        + ["72.0 \u00b1 2.0", "\u2013", "81.0 \u00b1 0.0", "6.0", "4.0"],
    }
    assert "local: a client\u2019s weights right after its last training" in table.caption
    assert "FLOPs are counted in 1e9 operations." in table.caption


def test_what_fine_tuning_cost_has_a_column_where_runs_were_fine_tuned(small: Study, tmp_path: Path) -> None:
    assert "fine-tuning FLOPs, 1e6" not in [column.name for column in found(small, "main")[0].columns]
    curves = {"global": [60, 70], "local": [60, 70], "finetuned": [70, 80]}
    make_run(tmp_path / "tuned" / "a", curves, method="fedavg", mask="none", finetune=1e8)
    study = study_of(tmp_path / "tuned")
    [table] = found(study, "main")
    [cells] = texts(table).values()
    assert (table.columns[-1].name, cells[-1]) == ("fine-tuning FLOPs, 1e6", "100.0")
    [row] = [row for row in numbers(study) if row["quantity"] == "cost/flops_finetune"]
    assert (row["unit"], row["mean"], row["std"], row["seeds"]) == ("FLOPs", "100000000.0", "0.0", "1")


def test_test_sets_that_are_too_small_are_told(small: Study, tmp_path: Path) -> None:
    assert len(make_report(small).facts) == 2
    for name, smallest, fewer in (("d0", 7, 3), ("d1", 5, 1), ("f0", 9, 0)):
        path = tmp_path / name / "summary.json"
        tests = {"asked": 9, "smallest": smallest, "median": 8.5, "fewer": fewer}
        tests = {f"client_tests/{name}": value for name, value in tests.items()}
        path.write_text(json.dumps(json.loads(path.read_text()) | tests))
    fact = make_report(study_of(tmp_path)).facts[2]
    assert (
        "in 2 of 3 runs clients were tested on fewer images than the 9 asked for: at most 3 clients in a run"
        in fact
    )
    assert "The smallest test set has 5 images. The lowest median of a run is 8.5." in fact


def test_captions_say_what_means_are_over(tmp_path: Path) -> None:
    weighted = {"eval": {"targets": [70.0], "weighting": "images"}}
    make_run(tmp_path / "w", {"global": [40, 60]}, **weighted)
    [table] = found(study_of(tmp_path), "main")
    assert "mean over the clients\u2019 test images" in table.caption


def test_the_best_is_bold_and_equal_looks_are_equal(small: Study) -> None:
    lines = render("report.md", report=make_report(small)).splitlines()
    dst, fedavg = lines[lines.index("### Digits: accuracy and costs") + 4 :][:2]
    assert dst.startswith("| FedSpa (DST) | missing |")
    assert "| 61.0 \u00b1 1.0 | **70.0 \u00b1 1.0** | **81.0 \u00b1 1.0 (3/4)** | **3.0** | **2.0** |" in dst
    assert (
        "| **72.0 \u00b1 2.0** | \u2013 | **81.0 \u00b1 0.0** | 6.0 | 4.0 |" in fedavg
    )  # 81.02 looks the same


def test_rounds_to_an_accuracy_stand_under_their_kind(small: Study) -> None:
    [table] = found(small, "rounds")
    shown = dict(
        zip(
            [(c.setting.split, c.kind, c.target) for c in table.columns],
            zip(*texts(table).values(), strict=True),
            strict=True,
        )
    )
    dirichlet = {key[1:]: pair for key, pair in shown.items() if key[0] == "Dirichlet 0.3"}
    assert dirichlet == {
        ("global", "70"): (">2", "2.0"), ("global", "90"): (">2", ">2"),
        ("personal", "70"): (">2 (1/2)", "\u2013"), ("personal", "90"): (">2", "\u2013"),
        ("local", "70"): ("1.5 \u00b1 0.5", "2.0"), ("local", "90"): (">2", ">2"),
    }  # fmt: skip
    assert shown["IID", "global", "90"] == ("missing", "2.0 [1 seed]")
    [column] = found(small, "rounds", [81.0])[-1].columns[:1]
    assert column.name == "81 %"


def test_rounds_say_how_finely_they_are_known(tmp_path: Path) -> None:
    make_run(tmp_path / "d", {"global": [40, 60], "local": [72, 80]}, eval={"targets": [50.0], "every": 5})
    [table] = found(study_of(tmp_path), "rounds")
    assert "Tested every 5 rounds." in table.caption


def test_rounds_to_a_rivals_best(small: Study) -> None:
    table = found(small, "rivals")[-1]
    assert table.groups == [
        ("FedAvg global, 72.0 % in round 2.0", 2, 4), ("FedAvg local, 81.0 % in round 2.0", 5, 7),
    ]  # fmt: skip
    assert texts(table) == {
        # global, personal, local: 70 % in round 1, 74 % in round 2
        "FedSpa (DST)": [">2", ">2 (1/2)", "1.5 \u00b1 0.5 (\u221225 %)", ">2", ">2", ">2 (1/2)"],
        "FedAvg": ["2.0 (\u00b10 %)", "\u2013", "2.0 (\u00b10 %)", ">2", "\u2013", "2.0 (\u00b10 %)"],
    }


def test_a_rival_is_raced_seed_by_seed(tmp_path: Path) -> None:
    make_run(tmp_path / "r0", {"global": [10, 20, 30, 80, 75]}, method="fedavg", mask="none", seed=0)
    make_run(tmp_path / "r1", {"global": [10, 60, 40, 50, 55]}, method="fedavg", mask="none", seed=1)
    for seed, local in enumerate(([50, 90, 90, 90, 90], [61, 61, 61, 61, 61], [0, 0, 0, 0, 0])):
        make_run(tmp_path / str(seed), {"local": local}, seed=seed)
    [table] = found(study_of(tmp_path), "rivals")
    column = [column.kind for column in table.columns].index("local")
    cell = next(iter(table.lines.values()))[column]
    assert cell.values == (2, 1)  # 80 % in round 2, 60 % in round 1; seed 2 has no rival
    assert cell.text == "1.5 \u00b1 0.5 (\u221250 %) [2 seeds]"  # the rival itself took 4 and 2 rounds


def test_the_worst_clients_and_the_samples_of_an_update(tmp_path: Path) -> None:
    make_run(tmp_path / "0", {"local": [50.0, 90.0]}, seed=0)
    make_run(tmp_path / "1", {"local": [50.0, 70.0]}, seed=1)
    [table] = found(study_of(tmp_path), "worst")
    [[worst, samples]] = table.lines.values()
    worst_of = [run.scores("accuracy")["local"]["worst_decile"] for run in study_of(tmp_path).runs]
    assert list(worst.values) == worst_of and worst_of[0] > worst_of[1]
    assert samples.values == (4.0, 4.0)  # 8 in each round, of two clients


def test_wall_time_of_a_client_update(small: Study) -> None:
    [table] = found(small, "details")
    assert [column.name for column in table.columns] == ["train, s", "train, s", "search, s"]
    assert texts(table) == {
        "FedSpa (DST)": ["missing", "0.200", "0.050"],
        "FedAvg": ["0.200 [1 seed]", "0.200", "\u2013"],
    }
    assert "start with all weights" not in table.caption


def test_methods_that_start_dense_are_named(tmp_path: Path) -> None:
    for method in ("fedspa", "lotteryfl", "subfedavg"):
        make_run(tmp_path / method, {"local": [1]}, method=method, mask="none", density=(0.5, 0.6, 0.5, 0.7))
    [table] = found(study_of(tmp_path), "details")
    assert "Clients of LotteryFL and Sub-FedAvg start with all weights" in table.caption


def test_units_are_the_papers_where_costs_are_so_large() -> None:
    assert tables.traffic_unit(369.2e9) == (1e9, "GB")
    assert tables.traffic_unit(21e6) == (1e6, "MB")
    assert tables.flops_unit(172.9e14) == (1e14, "1e14")
    assert tables.flops_unit(9e13) == (1e12, "1e12")
    assert tables.flops_unit(254.1e9) == (1e9, "1e9")


def example() -> Report:
    """A report of one table."""
    shown = {
        "a=x_y": [Cell("1.0 \u00b1 0.1", (0.9, 1.1)), Cell("5", (5,)), Cell("missing")],
        "50 % & more": [Cell("2.0 \u00b1 0.1", (1.9, 2.1)), Cell("5", (5,)), Cell(">9", (9,))],
    }
    columns = [
        Column(Setting("digits", split, (), {}), split, name, lambda run: None, best=best)
        for split, name, best in (("A_1", "acc", "high"), ("A_1", "GB", "low"), ("B", "acc", "high"))
    ]
    lines = {Row(label, "none", (), label): cells for label, cells in shown.items()}
    return Report("Title", ["A fact."], [Table("example", "Example", "100 % honest", columns, lines)], [], [])


def test_markdown() -> None:
    text = render("report.md", report=example())
    assert text.startswith("# Title\n\nA fact.\n\n## Tables\n\n### Example\n\n")
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "| | A\\_1: acc | A\\_1: GB | B: acc |",
        "| --- | ---: | ---: | ---: |",
        "| a=x\\_y | 1.0 \u00b1 0.1 | **5** | missing |",
        "| 50 % & more | **2.0 \u00b1 0.1** | **5** | **\\>9** |",
    ]


def test_latex() -> None:
    text = render("tables.tex", report=example())
    assert (
        re.sub(r"(honest).*}", r"\1}", text)  # without the meaning of the signs
        == r"""% Needs \usepackage{booktabs,graphicx}.

\begin{table}
\centering
\caption{Example. 100 \% honest}
\label{tab:example}
\begin{tabular}{lrrr}
\toprule
 & \multicolumn{2}{c}{A\_1} & \multicolumn{1}{c}{B} \\
\cmidrule(lr){2-3} \cmidrule(lr){4-4}
 & acc & GB & acc \\
\midrule
a=x\_y & 1.0 $\pm$ 0.1 & \textbf{5} & missing \\
50 \% \& more & \textbf{2.0 $\pm$ 0.1} & \textbf{5} & \textbf{$>$9} \\
\bottomrule
\end{tabular}
\end{table}
"""
    )


def test_html() -> None:
    text = render("page.html", report=example(), drawings={}, links=[("run <1>", "../run")])
    assert '<th colspan="2">A_1</th>' in text
    assert "<td><b>2.0 \u00b1 0.1</b></td>" in text
    assert '<td class="missing">missing</td>' in text
    assert "50 % &amp; more" in text
    assert '<a href="../run">run &lt;1&gt;</a>' in text


def test_results_have_all_digits(small: Study) -> None:
    rows = numbers(small)

    def cells(
        split: str, method: str, quantity: str, kind: str = "", target: str = ""
    ) -> list[tuple[str, ...]]:
        wanted = {"split": split, "method": method, "quantity": quantity, "kind": kind, "target": target}
        return [
            (row["mean"], row["std"], row["seeds"], row["reached"])
            for row in rows
            if all(row[key] == value for key, value in wanted.items())
        ]

    [local] = cells("Dirichlet 0.3", "fedavg", "accuracy", "local")
    assert float(local[0]) == pytest.approx(81.02) and local[2] == "2"
    assert cells("Dirichlet 0.3", "fedspa", "cost/traffic_bytes") == [("3000000.0", "0.0", "2", "")]
    assert cells("Dirichlet 0.3", "fedspa", "rounds_to", "personal", "70") == [("", "", "2", "1")]
    assert cells("Dirichlet 0.3", "fedspa", "rounds_to_best_of", "local", "FedAvg global") == [
        ("1.5", "0.5", "2", "2")
    ]
    assert cells("IID", "fedspa", "accuracy", "global") == [("", "", "0", "")]


# The paper


def paper_run(folder: Path, curves: dict[str, list[float]], **changes: object) -> Path:
    facts = {
        "dataset": "cifar10", "model": "vgg11", "partition": {"name": "dirichlet", "gamma": 0.3}, "clients": 100,
        "rounds": 1000, "traffic": 369.2e9, "flops": 173.5e14, "layer_sparsity": {"name": "erk"},
    }  # fmt: skip
    return make_run(folder, curves, **(facts | changes))  # type: ignore[arg-type]


def test_the_papers_tables_are_complete() -> None:
    with (project_root() / "src" / "fedspa" / "report" / "paper.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    counts = {name: sum(row["table"] == name for row in rows) for name in {row["table"] for row in rows}}
    assert counts == {
        "main": 7 * 9 * 3,  # methods x data settings x (accuracy, traffic, FLOPs)
        "rounds": 6 * 3 * 3 * 2,  # methods x partitions x targets x data sets; Local is not in it
        "sparsity": 5 * 3 * 3,
        "layer_sparsity": 2 * 3 * 3,
    }
    vgg = ("cifar10", "vgg11", "dirichlet", "0.3")
    values = printed_values()
    assert values[*vgg, "fedspa", "dst", "0.5", "erk", "accuracy", ""].text == "88.2 \u00b1 0.4"
    assert values[*vgg, "fedavg", "none", "0", "", "rounds_to", "70"].text == "241.0 \u00b1 3.7"
    assert values[*vgg, "subfedavg", "none", "0.5", "", "rounds_to", "80"].text == ">1000"
    assert values[*vgg, "local", "none", "0", "", "traffic", ""].text == "\u2013"
    resnet = ("cifar100", "resnet18", "iid", "", "fedspa", "dst")
    assert values[*resnet, "0.8", "erk", "accuracy", ""].text == "32.0 \u00b1 0.7"
    assert values[*resnet, "0.5", "uniform", "flops", ""].unit == "1e16"
    assert values[*resnet, "0.5", "erk", "flops", ""].text == "705.1"  # of the main table, not 7.1 x 1e16


def test_a_cell_matches_by_method_data_and_sparsity(tmp_path: Path) -> None:
    curves = {"local": [80.0]}
    changes: dict[str, dict[str, object]] = {
        "same": {},
        "model": {"model": "lenet5"},
        "clients": {"clients": 20},
        "sparsity": {"sparsity": 0.4},
        "gamma": {"partition": {"name": "dirichlet", "gamma": 0.4}},
        "uniform": {"layer_sparsity": {"name": "uniform"}},
        "initial": {"mask": "dst", "mask.initial": "different"},
        "cut": {"dataset_rows": 1},
    }
    for name, change in changes.items():
        paper_run(tmp_path / name, curves, **{key: value for key, value in change.items() if "." not in key})
    config = tmp_path / "initial" / "config.yaml"
    config.write_text(
        config.read_text().replace("mask:\n  name: dst", "mask:\n  name: dst\n  initial: different")
    )
    config = tmp_path / "cut" / "config.yaml"
    config.write_text(config.read_text().replace("train_rows: null", "train_rows: 6000"))
    matched = {
        run.name: printed(run, "accuracy") is not None for run in read_runs(folders_under(tmp_path)).runs
    }
    assert matched == {name: name == "same" for name in changes}


def test_ours_stand_beside_the_papers_with_the_difference(tmp_path: Path) -> None:
    for seed, local in ((0, 87.0), (1, 88.0)):
        paper_run(tmp_path / str(seed), {"global": [60.0, 70.0], "local": [70.0, local]}, seed=seed)
    [final] = paper_tables(study_of(tmp_path))
    assert [column.name for column in final.columns[:7]] == [
        "paper",
        "global",
        "local",
        "paper",
        "ours",
        "paper",
        "ours",
    ]
    assert texts(final)["FedSpa (DST)"] == [
        "88.2 \u00b1 0.4", "70.0 (\u221218.2)", "87.5 \u00b1 0.5 (\u22120.7)",
        "369.2", "369.2 (\u00b10.0)", "173.5", "173.5 (\u00b10.0)",
        "164.3 \u00b1 5.0", "2.0 (\u2212162.3)", "1.0 (\u2212163.3)",
    ]  # fmt: skip


def test_a_shorter_run_has_no_final_difference(tmp_path: Path) -> None:
    paper_run(tmp_path / "run", {"local": [70.0]}, rounds=300)
    [final] = paper_tables(study_of(tmp_path), [70])
    assert texts(final)["FedSpa (DST)"][:2] == ["88.2 \u00b1 0.4", "70.0"]
    assert "Ours ran 300 rounds, the paper\u2019s 1000" in final.caption
    assert texts(final)["FedSpa (DST)"][-1] == "1.0 (\u2212163.3)"


# The page


def test_the_page_needs_nothing_else(small: Study, tmp_path: Path) -> None:
    small.left_out.append(("torn", "its summary.json cannot be read"))
    report = make_report(small, beside_paper=True)
    assert [picture.title.removeprefix("Digits, Dirichlet 0.3: ") for picture in report.pictures[3:]] == [
        "accuracy by round", "accuracy against traffic", "accuracy of the clients",
    ]  # fmt: skip
    drawn = [report.pictures[2], report.pictures[5]]  # saving them all would take seconds
    text = write_report(replace(report, pictures=drawn), small, tmp_path / "out").read_text()
    links = re.findall(r'(?:src|href)="(?!data:|#)(.*?)"', text)
    assert links and all((tmp_path / "out" / unquote(link)).exists() for link in links)
    assert not re.findall(r"https?://|@import|url\(|<script|<link", text)
    assert "torn: its summary.json cannot be read." in text
    assert "No cell of this study is one of the paper\u2019s" in text
    for item in (*report.tables, *drawn):
        assert f'id="{item.name}"' in text and f"{html.escape(item.title)}</h" in text
        assert f"<p>{html.escape(item.caption)}</p>" in text
    assert text.count("<img ") == 2
    files = {
        file.relative_to(tmp_path / "out").as_posix()
        for file in (tmp_path / "out").rglob("*")
        if file.is_file()
    }
    assert files >= {"index.html", "report.md", "tables.tex", "results.csv", "figures/clients-digits-iid.svg"}
    links = re.findall(r"\]\((.*?)\)", (tmp_path / "out" / "report.md").read_text())
    assert links and all((tmp_path / "out" / link).is_file() for link in links)


def test_the_same_study_gives_the_same_page(small: Study, tmp_path: Path) -> None:
    def page(name: str) -> bytes:
        report = make_report(small)
        return write_report(
            replace(report, pictures=report.pictures[2:3]), small, tmp_path / name
        ).read_bytes()

    assert page("a") == page("b")


def test_masks_are_drawn_where_runs_kept_them(tmp_path: Path) -> None:
    kept = {"0": [1, 1, 1, 0, 0, 0, 1, 1], "1": [1, 1, 0, 1, 0, 0, 1, 1], "2": [0, 0, 0, 1, 1, 1, 1, 1]}
    make_run(tmp_path / "run", {"local": [1]}, masks=kept)
    pictures = {picture.title: picture.caption for picture in make_report(study_of(tmp_path)).pictures}
    assert "FedSpa (DST): r = " in pictures["Digits, Dirichlet 0.3: do alike clients find alike masks?"]
    assert "Digits, Dirichlet 0.3: density by layer" in pictures


# The command line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["swep=main"], "swep is not an option: did you mean sweep?"),
        (["main"], "an option is written as key=value"),
        (["paper=true"], "either sweep=<name> or runs="),
        (["sweep=a", "runs=b"], "either sweep=<name> or runs="),
        (["sweep="], "sweep= has no value"),
        (["sweep=no_such_sweep"], "sweep=no_such_sweep is not known"),
        (["runs=nowhere"], "runs=nowhere is no folder"),
        ([f"runs={'x' * 300}"], "is no folder"),
        (["runs=.", "paper=maybe"], "paper=maybe is not true or false"),
        (["runs=.", "targets=a"], "targets[0]=a is not a number"),
        (["runs=${x}"], "runs=${x} cannot be resolved: the setting x does not exist or is null."),
        (["runs=???"], "runs=??? has no value: write runs=<value>."),
        (["runs=.", "targets=700"], "targets=700.0 is out of range"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_options(Options, arguments)


def test_options_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    options = read_options(Options, [f"runs={tmp_path / 'mine'}", "paper=true", "targets=[80,70]"])
    assert (options.name, options.paper, options.targets) == ("mine", True, [70, 80])
    assert options.folder == project_root() / "outputs" / "reports" / "mine"
    assert read_options(Options, ["runs=.", "targets=70,"]).targets == [70]
    assert read_options(Options, ["runs=tags.method = 'fedspa'"]).name == "mlflow"


def test_the_command_writes_a_report_without_torch(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", {"global": [10, 20]})
    ascii_only = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }  # files are UTF-8 all the same
    (make_run(tmp_path / "runs" / "b", {"global": [10, 20]}) / "summary.json").unlink()
    script = project_root() / "src" / "report.py"
    code = f"import runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, {str(script.parent)!r})\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\nfinally: print('torch._C' in sys.modules)"
    command = [
        sys.executable,
        "-c",
        code,
        str(script),
        f"runs={tmp_path / 'runs'}",
        f"out={tmp_path / 'out'}",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, check=True, env=os.environ | ascii_only
    )
    assert "Left out: b: it has no summary.json, so it has not finished." in done.stdout
    assert f"The report is {tmp_path / 'out' / 'index.html'}" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
    (tmp_path / "file").touch()
    words = [sys.executable, str(script), f"runs={tmp_path / 'runs'}", f"out={tmp_path / 'file' / 'out'}"]
    nowhere = subprocess.run(words, capture_output=True, text=True)
    assert nowhere.returncode == 2 and nowhere.stderr.startswith(
        f"Error: out={tmp_path / 'file' / 'out'} cannot"
    )
    failed = subprocess.run([sys.executable, str(script), "sweep=x"], capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.startswith("Error: sweep=x is not known")


def test_the_measured_density_stands_beside_the_asked_one(tmp_path: Path) -> None:
    curves = {"local": [50.0, 60.0]}
    make_run(tmp_path / "d0", curves, seed=0, density=(0.5, 0.4, 0.29, 0.5))
    make_run(tmp_path / "d1", curves, seed=1, density=(0.5, 0.5, 0.5, 0.5))
    dense = {"method": "fedavg", "mask": "none", "sparsity": 0.0}
    make_run(tmp_path / "f0", curves, density=(1.0, 1.0, 1.0, 1.0), **dense)
    make_run(tmp_path / "old", curves, method="local", mask="none")
    [table] = found(study_of(tmp_path), "details")
    assert {label: cells[:4] for label, cells in texts(table).items()} == {
        "FedSpa (DST)": ["0.500", "0.450 \u00b1 0.050", "0.395 \u00b1 0.105", "0.500"],
        "FedAvg": ["1.000 [1 seed]"] * 4, "Local": ["\u2013"] * 4,
    }  # fmt: skip
    measured = {
        row["row"]: (row["sparsity"], row["mean"])
        for row in numbers(study_of(tmp_path))
        if row["quantity"] == "final/density"
    }
    assert measured == {"FedSpa (DST)": ("0.5", "0.45"), "FedAvg": ("0.0", "1.0")}


def test_dense_runs_need_no_densities(small: Study, tmp_path: Path) -> None:
    make_run(tmp_path / "new", {"local": [5.0]}, density=(1.0, 1.0, 1.0, 1.0))
    for study in (small, study_of(tmp_path / "new")):  # the first one's runs do not say theirs
        assert [
            column.unit for table in found(study, "details") for column in table.columns if column.unit != "s"
        ] == []
