"""Tables: what is published stands where it belongs and nowhere else, and every format says the same."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from eagle_mars.errors import ConfigError
from evaluation import readme
from evaluation.metrics import Cell
from evaluation.readme import ROOT, rendered
from evaluation.table_result import FilledPart, FilledRow, FilledTable, difference, latex, markdown, mean_cell, to_csv
from evaluation.tables import MEAN, Row, check_table, read_table, table_names

PART = {
    "title": "a part",
    "models": ["smollm2"],
    "tasks": ["gsm8k"],
    "arms": {"strict": {"method": "exact"}, "MARS": {"method": "mars", "options": {"theta": 0.9}}},
    "metrics": ["speed-up", "tau"],
    "unpublished": "nobody says",
}


def published_cells(name: str) -> dict[tuple[str, str, str, str, str], float]:
    return {
        (row.model, row.task, row.tree, row.arm, metric): cell.value
        for part in read_table(name).parts
        for row in part.rows()
        for metric in part.metrics
        if (cell := part.published_cell(row, metric)).value is not None
    }


def test_published_values_are_those_of_the_paper() -> None:
    """Typed again from VERIFICATION section 3, so that a slip in a YAML file shows."""
    first = published_cells("table1")
    assert len(first) == 6 * 2 * 3
    assert all(task == MEAN for _, task, *_ in first)
    assert first["vicuna-13b", MEAN, "", "EAGLE-3", "speed-up"] == 3.12
    assert first["llama-3.3-70b", MEAN, "", "MARS", "tau"] == 6.39
    assert first["qwen3-235b-a22b", MEAN, "", "MARS as released", "speed-up"] == 3.42
    by_k = {tree: value for (_, _, tree, _, metric), value in published_cells("table2").items() if metric == "tau"}
    assert by_k == {"K = 6": 5.79, "K = 9": 6.58, "K = 12": 6.87, "K = 15": 6.92}
    chains = published_cells("table5")
    assert chains["llama-3.3-70b-draft-8b", "humaneval", "", "MARS", "speed-up"] == 4.36
    assert ("llama-3.3-70b-draft-8b", "gsm8k", "", "MARS", "speed-up") not in chains
    sweep = published_cells("theta")
    assert sweep["qwen3-8b", "humaneval", "", "θ = 0.9", "pass@4"] == 0.88
    assert sweep["qwen3-8b", "wmt19", "", "θ = 0.96", "BLEU"] == 29.39


def test_our_own_pair_is_in_every_table_and_never_published() -> None:
    for name in table_names():
        table = read_table(name)
        assert all(any(model.startswith("smollm2") for model in part.models) for part in table.parts)
        assert not any(model.startswith("smollm2") for model, *_ in published_cells(name))


def test_a_cell_without_a_published_value_says_why() -> None:
    part = check_table("t", {"title": "t", "source": "s", "parts": [PART]}).parts[0]
    assert part.published_cell(next(part.rows()), "tau") == Cell.empty("nobody says")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"published": [{"model": "m", "task": "mbpp", "arms": ["strict"], "values": {"tau": 1}}]}, "fit no row"),
        ({"published": [{"model": "m", "task": "gsm8k", "arms": ["strct"], "values": {"tau": 1}}]}, "fit no row"),
        ({"published": [{"model": "m", "task": "gsm8k", "arms": ["strict"], "values": {"tua": 1}}]}, "fit no row"),
        ({"tasks": ["gsm9k"]}, "no task 'gsm9k'"),
        ({"arms": {"strict": {"method": "exact", "options": {"theta": 0.9}}}}, "doesn't read --theta"),
        ({"metrcs": []}, "metrcs"),
    ],
)
def test_a_wrong_table_is_refused(change: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_table("t", {"title": "t", "source": "s", "parts": [{**PART, **change}]})


def test_an_unknown_table_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"table1.*theta"):
        read_table("7")


# --- filled ---


def filled_table() -> FilledTable:
    def row(model: str, arm: str, published: dict[str, Cell], ours: dict[str, Cell]) -> FilledRow:
        key = Row(model=model, temperature=1.0, tree="", task="gsm8k", arm=arm)
        return FilledRow(row=key, questions=4 if model == "smollm2" else 0, published=published, ours=ours)

    ours = Cell(1.25, 1.0, 1.5)
    none, left_out = Cell.empty("nobody says"), Cell.empty("not run")
    rows = (
        row("big_model", "strict", {"speed-up": Cell(3.0), "tau": none}, {"speed-up": left_out, "tau": left_out}),
        row("smollm2", "strict", {"speed-up": Cell(1.5), "tau": none}, {"speed-up": ours, "tau": Cell(2)}),
        row("other", "strict", {"speed-up": none, "tau": none}, {"speed-up": left_out, "tau": left_out}),
    )  # fmt: skip
    source = {
        "command": "python -m x",
        "device": "cpu",
        "threads": 1,
        "packages": {"torch": "2"},
        "commit": "0123456789ab",
        "dirty": False,
        "date": "today",
    }
    part = FilledPart(title="50 % & more", metrics=("speed-up", "tau"), rows=rows)
    return FilledTable(name="t", title="T", source="S", notes=("N",), scope={}, parts=(part,), provenance=source)


def test_markdown_shows_published_ours_and_difference() -> None:
    text = markdown(filled_table())
    assert "| model | task | method | n | speed-up: published | ours | difference | tau |" in text
    assert "| smollm2 | gsm8k | strict | 4 | 1.5 | 1.25 [1, 1.5] | -0.25 [-0.5, +0] | 2 |" in text
    assert "| big_model | gsm8k | strict | 0 | 3 | (1) | - | (1) |" in text
    assert "(1) not run.  \n(2) nobody says." in text
    assert "No published value of tau: (2)." in text
    assert "Neither published nor run: gsm8k with other (1)." in text
    assert "commit 0123456789, today" in text


def test_csv_holds_every_cell_with_its_reasons() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(filled_table()))))
    assert len(rows) == 3 * 2
    ours = next(row for row in rows if row["model"] == "smollm2" and row["metric"] == "speed-up")
    assert (ours["published"], ours["ours"], ours["low"], ours["high"], ours["difference"]) == (
        "1.5", "1.25", "1", "1.5", "-0.25",
    )  # fmt: skip
    empty = next(row for row in rows if row["model"] == "other")
    assert (empty["published"], empty["ours"], empty["why not ours"]) == ("", "", "not run")


def test_latex_has_as_many_cells_as_columns() -> None:
    text = latex(filled_table())
    assert r"\begin{tabular}{lllrrrr}" in text
    assert r"big\_model" in text
    body = [line for line in text.splitlines() if line.startswith(("big", "smollm2"))]
    assert [line.count("&") for line in body] == [6, 6]
    assert "other" not in text


def test_a_filled_table_survives_its_file() -> None:
    table = filled_table()
    assert FilledTable.model_validate_json(table.model_dump_json()) == table


def test_the_mean_over_tasks_adds_errors_in_squares() -> None:
    assert mean_cell([Cell(1.0, 0.7, 1.3), Cell(3.0, 2.6, 3.4)]) == Cell(2.0, pytest.approx(1.75), pytest.approx(2.25))
    assert mean_cell([Cell(1.0), Cell(3.0, 2.0, 4.0)]) == Cell(2.0)
    assert mean_cell([Cell(1.0), Cell.empty("broken")]).reason == "a task has no value: broken"
    assert mean_cell([Cell.empty("not run"), Cell.empty("not run")]).reason == "not run"


def test_a_difference_needs_both_values() -> None:
    assert difference(Cell(2.0), Cell(3.0, 2.5, 3.5)) == Cell(1.0, 0.5, 1.5)
    assert difference(Cell(2.0), Cell.empty("x")).value is None


# --- README ---


def test_readme_says_what_the_results_say() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("<!-- results: ") == text.count("<!-- end of results -->") >= 2
    assert rendered(text) == text, "run python -m evaluation.readme"


def test_readme_shows_our_rows_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "docs" / "results" / "tables" / "t"
    directory.mkdir(parents=True)
    (directory / "table.json").write_text(filled_table().model_dump_json())
    few = rendered("<!-- results: reproduced -->\n<!-- end of results -->", tmp_path)
    assert "tables/t/table.md" in few
    assert "1.25" not in few
    monkeypatch.setattr(readme, "_FEWEST_QUESTIONS", 1)
    text = rendered("before\n<!-- results: reproduced -->\nold\n<!-- end of results -->\nafter\n", tmp_path)
    assert "1.25 [1, 1.5]" in text
    assert "big_model" not in text
    assert "nobody says" not in text  # what isn't published is no news in README
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("<!-- end of results -->\nafter\n")
    with pytest.raises(ConfigError, match="'nothing'"):
        rendered("<!-- results: nothing -->\n<!-- end of results -->", tmp_path)


def test_a_new_heldout_run_makes_readme_stale(tmp_path: Path) -> None:
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    method = {
        "method": "mars 8,3,4", "tau": 2.284, "speedup_vs_ar": 1.43, "speedup_vs_generate": 1.467,
        "relaxed_per_1000": 77.2, "identical_to_ar": 1,
    }  # fmt: skip
    (results / "rows.jsonl").write_text(json.dumps({"prompts": 40, "theta": 0.9, "methods": [method]}) + "\n")
    text = rendered("<!-- results: heldout -->\n<!-- end of results -->", tmp_path)
    assert "| `mars` θ = 0.9 | 8 | 2.28 | 1.43 | 1.47 | 77 | 1 of 40 |" in text
