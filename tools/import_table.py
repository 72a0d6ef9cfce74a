"""The import table of pyproject.toml as an import-linter contract: an allow list, so what a row does not name is forbidden.

Import-linter's own "forbidden" contract lists what must not be imported and refuses names of packages that do not exist yet;
the complement of this table would be ten times as long and silent about a new package."""

from __future__ import annotations

import sys

from grimp import ImportGraph
from importlinter.application import output
from importlinter.domain import fields
from importlinter.domain.contract import Contract, ContractCheck

ROOT = "kvsim"


def read_row(row: str) -> tuple[str, set[str]]:
    """'trace: units tables | numpy' -> ("trace", {"units", "tables", "| numpy"}); '*' stands for every part of kvsim."""
    package, _, allowed = row.partition(":")
    parts, _, third_party = allowed.partition("|")
    return package.strip(), set(parts.split()) | {f"| {name}" for name in third_party.split()}


def part(module: str) -> str:
    """kvsim.trace.open -> trace, kvsim -> kvsim, numpy -> | numpy"""
    root, *rest = module.split(".")
    return (rest[0] if rest else ROOT) if root == ROOT else f"| {root}"


class ImportTable(Contract):
    """rows: one "package: parts of kvsim | third-party packages" for every module directly under kvsim."""

    type_name = "table"
    rows = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        table = dict(read_row(row) for row in self.rows)  # type: ignore[attr-defined]
        ours = sorted(m for m in graph.modules if not part(m).startswith("|"))
        complaints = [f"{m}: kvsim.{part(m)} has no row in the table" for m in ours if part(m) not in table]
        for module in ours:
            allowed = table.get(part(module), {"*"})
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                if imported.split(".")[0] not in sys.stdlib_module_names and not permitted(part(module), part(imported), allowed):
                    lines = ", ".join(str(d["line_number"]) for d in graph.get_import_details(importer=module, imported=imported))
                    complaints.append(f"{module}:{lines} imports {imported}, which the row of {part(module)} does not name")
        return ContractCheck(kept=not complaints, metadata={"complaints": complaints})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for complaint in check.metadata["complaints"]:
            output.print_error(complaint)


def permitted(importer: str, imported: str, allowed: set[str]) -> bool:
    return imported in {importer, *allowed} or ("*" in allowed and not imported.startswith("|"))
