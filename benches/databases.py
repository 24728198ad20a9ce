"""Databases that people use as exact search: each without an index, its rows stored beforehand, one call a query.

    maker(workload, query, reference, threads) --> search: () -> (values, row numbers)

A call with several queries at once is used where the database has one (lancedb, milvus-lite).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benches import workloads
from benches.data import Rows
from benches.workloads import Workload

Found = tuple[npt.NDArray[Any], npt.NDArray[Any]]
Search = Callable[[], Found]

_folders: list[tempfile.TemporaryDirectory[str]] = []  # kept until the process ends


def _folder() -> Path:
    _folders.append(tempfile.TemporaryDirectory(prefix="exactknn-"))
    return Path(_folders[-1].name)


def _check(workload: Workload) -> None:
    if workload.is_self or workload.metric != "sqeuclidean":
        raise ValueError("databases are compared on searches by squared Euclidean distance of other rows")


def _table(reference: Rows) -> Any:
    import pyarrow

    column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(reference.reshape(-1)), reference.shape[1])
    return pyarrow.table({"id": np.arange(len(reference)), "v": column})


def _as_found(rows: list[list[tuple[int, float]]], *, root: bool = False) -> Found:
    """Return pairs of row number and distance as arrays; `root`: the distances are not squared."""
    ids = np.array([[pair[0] for pair in row] for row in rows], np.int64)
    values = np.array([[pair[1] for pair in row] for row in rows], np.float64)
    return (values**2 if root else values), ids


def _duckdb(workload: Workload, query: Rows, reference: Rows, threads: int) -> Search:
    import duckdb

    _check(workload)
    dim = reference.shape[1]
    connection = duckdb.connect(config={"threads": threads})
    connection.register("given", _table(reference))
    connection.execute(f"create table rows as select id, v::float[{dim}] v from given")
    text = f"select id, array_distance(v, ?::float[{dim}]) d from rows order by d, id limit {workload.columns}"
    return lambda: _as_found([connection.execute(text, [row.tolist()]).fetchall() for row in query], root=True)


def _sqlite_vec(workload: Workload, query: Rows, reference: Rows, _: int) -> Search:
    import apsw
    import sqlite_vec

    _check(workload)
    connection = apsw.Connection(":memory:")
    connection.enable_load_extension(True)
    connection.load_extension(sqlite_vec.loadable_path())
    connection.execute(f"create virtual table rows using vec0(v float[{reference.shape[1]}])")
    with connection:
        connection.executemany(
            "insert into rows(rowid, v) values (?, ?)", ((i, row.tobytes()) for i, row in enumerate(reference))
        )
    text = f"select rowid, distance from rows where v match ? and k = {workload.columns} order by distance"
    return lambda: _as_found([list(connection.execute(text, (row.tobytes(),))) for row in query], root=True)


def _lancedb(workload: Workload, query: Rows, reference: Rows, _: int) -> Search:
    import lancedb

    _check(workload)
    table: Any = lancedb.connect(_folder()).create_table("rows", _table(reference))

    def search() -> Found:
        asked = table.search(list(query), vector_column_name="v").distance_type("l2").limit(workload.columns)
        found = asked.select(["id", "_distance"]).to_arrow()
        shape = (len(query), workload.columns)
        order = (
            np.argsort(found["query_index"].to_numpy(), kind="stable") if "query_index" in found.schema.names else ...
        )
        return found["_distance"].to_numpy()[order].reshape(shape), found["id"].to_numpy()[order].reshape(shape)

    return search


def _milvus_lite(workload: Workload, query: Rows, reference: Rows, _: int) -> Search:
    from pymilvus import DataType, MilvusClient

    _check(workload)
    client = MilvusClient(str(_folder() / "rows.db"))
    schema = MilvusClient.create_schema(auto_id=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("v", DataType.FLOAT_VECTOR, dim=reference.shape[1])
    index = client.prepare_index_params()
    index.add_index("v", index_type="FLAT", metric_type="L2")
    client.create_collection("rows", schema=schema, index_params=index)
    for start in range(0, len(reference), 8192):
        part = reference[start : start + 8192]
        client.insert("rows", [{"id": start + i, "v": row} for i, row in enumerate(part)])
    client.load_collection("rows")

    def search() -> Found:
        found = client.search("rows", data=list(query), anns_field="v", limit=workload.columns)
        return _as_found([[(hit["id"], hit["distance"]) for hit in hits] for hits in found])

    return search


SEARCHES: dict[str, Callable[[Workload, Rows, Rows, int], Search]] = {
    workloads.DUCKDB: _duckdb,
    workloads.SQLITE_VEC: _sqlite_vec,
    workloads.LANCEDB: _lancedb,
    workloads.MILVUS_LITE: _milvus_lite,
}
