#!/usr/bin/env python3
"""Remove from a copy of OpenBLAS for Linux the code that mpool cannot reach: LAPACK, which needs libgfortran, and most
of BLAS.

    python tools/trim_openblas.py libscipy_openblas.so trimmed.so

setup.py does this to the copy in the package. Every byte that stays keeps its place, so the kernels are the published
ones, with their speed and their bits. The file keeps its length, but the wheel compresses what was removed: it becomes
trap instructions and zeros.

Code stays if it is reachable from the functions in ``KEPT``, from the initialisers, or from any pointer in the data,
such as the tables of kernels. References are found without a disassembler: on x86-64, 4 bytes behind any bytes that
look like CALL, JMP, Jcc or LEA; on 64-bit ARM, targets of branches, and all in a page that ADRP names. These rules find
a few references that are none, and miss jumps of 8 bits. A test with a disassembler therefore looks for references to
removed code in the version ``CHECKED``; setup.py packs any other version whole. Functions are known from the symbol
table.

Libraries that only removed code needs are no longer required; their symbols become weak. Removed functions are not
exported. The name in the file changes, so that no other module is linked with this copy.
"""

import struct
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: The version of scipy-openblas32 whose library was checked. To change it, install the new version, build, and run
#: tests/python/core/test_trim_openblas.py with --slow.
CHECKED = "0.3.33.201.0"
#: Functions that csrc/kernels/blas.c calls.
KEPT = ("cblas_sgemm", "openblas_get_corename", "openblas_set_num_threads")
PREFIX = "scipy_"  # of the names that scipy-openblas32 exports
SONAME, NEW_SONAME = "libscipy_openblas.so", "libmpool_openblas.so"
assert len(SONAME) == len(NEW_SONAME), "the new name replaces the old one in place"

X86_64, AARCH64 = 62, 183  # e_machine
#: Relocations of the procedure linkage table; an instruction that stops the process.
JUMP_SLOT = {X86_64: 7, AARCH64: 1026}
TRAP = {X86_64: b"\xcc", AARCH64: struct.pack("<I", 0xD4200000)}  # INT3; BRK #0
PLT_HEADER = {X86_64: 16, AARCH64: 32}
PLT_ENTRY = 16
RELATIVE_AND_ABSOLUTE = {X86_64: (8, 1, 6), AARCH64: (1027, 257, 1025)}  # RELATIVE, 64 or ABS64, GLOB_DAT
THREAD_LOCAL = {X86_64: (16, 17, 18), AARCH64: (1028, 1029, 1030, 1031)}

RELOCATIONS, SHF_EXECINSTR = (4, 9, 19), 4  # types SHT_RELA, SHT_REL, SHT_RELR
#: Sections with code. Those of .plt.got have their targets in .rela.dyn.
CODE = (".init", ".plt", ".plt.got", ".text", ".fini")
DT_NEEDED, DT_SONAME, DT_VERNEED, DT_VERNEEDNUM = 1, 14, 0x6FFFFFFE, 0x6FFFFFFF
STT_FUNC, STB_WEAK, VERSION_GLOBAL = 2, 2, 1
SECTION, SYMBOL, RELOCATION = "<IIQQQQIIQQ", "<IBBHQQ", "<QQq"


class TrimError(Exception):
    """The file has a form that this script does not know. The message says which."""


class Section(NamedTuple):
    """A row of the section table."""

    name: str
    header: int  # offset of the row in the file
    type: int
    flags: int
    address: int
    offset: int
    size: int


class Symbol(NamedTuple):
    """A row of a symbol table."""

    name: str
    type: int
    defined: bool
    value: int
    size: int


class Library:
    """The bytes of a shared library for 64-bit little-endian Linux, and the tables in them."""

    def __init__(self, data: bytes) -> None:
        """Read the section table."""
        self.bytes = bytearray(data)
        if self.bytes[:6] != b"\x7fELF\x02\x01":
            raise TrimError("it is no 64-bit little-endian ELF file")
        self.machine = self.number("<H", 18)
        if self.machine not in TRAP:
            raise TrimError(f"machine {self.machine} is unknown")
        rows = [(self.number("<Q", 40) + index * 64) for index in range(self.number("<H", 60))]
        fields = [struct.unpack_from(SECTION, self.bytes, row) for row in rows]
        names = fields[self.number("<H", 62)][4]
        self.sections = {
            name: Section(name, row, *field[1:6])
            for row, field in zip(rows, fields) if (name := self.text(names + field[0]))}

    def number(self, layout: str, offset: int) -> int:
        """Return one number."""
        return int(struct.unpack_from(layout, self.bytes, offset)[0])

    def text(self, offset: int) -> str:
        """Return the string that ends with the next zero."""
        return self.bytes[offset:self.bytes.index(0, offset)].decode()

    def section(self, name: str) -> Section:
        """Return a section by its name."""
        if name not in self.sections:
            raise TrimError(f"it has no section {name}")
        return self.sections[name]

    def rows(self, name: str, layout: str) -> list[tuple[int, ...]]:
        """Return the rows of a table."""
        section = self.section(name)
        return list(struct.iter_unpack(layout, self.bytes[section.offset:section.offset + section.size]))

    def symbols(self, table: str, strings: str) -> list[Symbol]:
        """Return the rows of a symbol table."""
        start = self.section(strings).offset
        return [Symbol(self.text(start + name), info & 15, place != 0, value, size)
                for name, info, _other, place, value, size in self.rows(table, SYMBOL)]

    def array(self, section: Section) -> NDArray[np.uint8]:
        """Return a copy of the bytes of a section."""
        return np.frombuffer(bytes(self.bytes[section.offset:section.offset + section.size]), np.uint8)


def x86_references(code: NDArray[np.uint8], address: int, targets: NDArray[np.int64]) -> tuple[
        NDArray[np.int64], NDArray[np.int64]]:
    """Return places in code, and what they refer to: 4 bytes that are the distance from their end to a target, behind
    the bytes of CALL, JMP, Jcc, or LEA with an address relative to its own. Other instructions refer to functions
    through pointers in the data."""
    jumps = code & 0xFE == 0xE8
    jumps[1:] |= (code[:-1] == 0x0F) & (code[1:] & 0xF0 == 0x80)
    jumps[2:] |= (code[:-2] & 0xF8 == 0x48) & (code[1:-1] == 0x8D) & (code[2:] & 0xC7 == 0x05)
    opening = np.flatnonzero(jumps)
    at = opening[opening + 4 < len(code)] + 1
    wide = code.astype(np.uint32)
    distance = (wide[at] | wide[at + 1] << 8 | wide[at + 2] << 16 | wide[at + 3] << 24).view(np.int32)
    ends = address + at + 4 + distance
    hit = is_one_of(ends, targets)
    return address + at[hit], ends[hit]


def arm_references(code: NDArray[np.uint8], address: int, targets: NDArray[np.int64]) -> tuple[
        NDArray[np.int64], NDArray[np.int64]]:
    """Return places in code, and what they refer to: targets of branches and ADR, and all in the page of an ADRP."""
    words = code.view("<u4").astype(np.int64)
    places = address + 4 * np.arange(len(words), dtype=np.int64)

    def signed(shift: int, bits: int) -> NDArray[np.int64]:
        value = words >> shift & (1 << bits) - 1
        return value - (value >> bits - 1 << bits)

    # ADR, ADRP: the low two bits of the distance stand apart
    low = words >> 29 & 3
    kinds = [((words & 0x7C000000) == 0x14000000, places + 4 * signed(0, 26)),  # B, BL
             ((words & 0xFE000000) == 0x54000000, places + 4 * signed(5, 19)),  # B.cond
             ((words & 0x7E000000) == 0x34000000, places + 4 * signed(5, 19)),  # CBZ, CBNZ
             ((words & 0x7E000000) == 0x36000000, places + 4 * signed(5, 14)),  # TBZ, TBNZ
             ((words & 0x9F000000) == 0x10000000, places + 4 * signed(5, 19) + low)]  # ADR
    found = []
    for kind, ends in kinds:
        hit = kind & is_one_of(ends, targets)
        found.append((places[hit], ends[hit]))
    page = (places >> 12) + 4 * signed(5, 19) + low
    of_targets = targets >> 12
    for at in np.flatnonzero(((words & 0x9F000000) == 0x90000000) & is_one_of(page, np.unique(of_targets))):
        near = targets[np.searchsorted(of_targets, page[at]):np.searchsorted(of_targets, page[at], "right")]
        found.append((np.full(len(near), places[at]), near))
    return np.concatenate([row[0] for row in found]), np.concatenate([row[1] for row in found])


def is_one_of(values: NDArray[np.int64], sorted_values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which values are among the sorted ones."""
    at = np.searchsorted(sorted_values, values)
    at[at == len(sorted_values)] = 0
    return sorted_values[at] == values


def reachable(library: Library) -> tuple[list[Symbol], list[bool], set[str]]:
    """Return the functions of a library, whether each is reachable, and the names that reachable code gets from other
    libraries."""
    for name, section in library.sections.items():
        if section.flags & SHF_EXECINSTR and name not in CODE:
            raise TrimError(f"it has code in {name}")
        if section.type in RELOCATIONS and name not in (".rela.dyn", ".rela.plt"):
            raise TrimError(f"it has relocations in {name}")
    dynamic = library.symbols(".dynsym", ".dynstr")
    functions = sorted({symbol._replace(name="") for symbol in library.symbols(".symtab", ".strtab")
                        if symbol.type == STT_FUNC and symbol.defined and symbol.size}, key=lambda row: row.value)
    names: dict[int, list[str]] = {}
    for symbol in (row for row in library.symbols(".symtab", ".strtab") if row.type == STT_FUNC):
        names.setdefault(symbol.value, []).append(symbol.name)
    starts = np.array([function.value for function in functions], np.int64)
    ends = np.array([function.value + function.size for function in functions], np.int64)
    if not len(functions) or (starts[1:] < np.maximum.accumulate(ends)[:-1])[starts[1:] != starts[:-1]].any():
        raise TrimError("its functions are unknown, or overlap")

    # what a slot of the procedure linkage table calls: a function of this library, or a name of another
    plt = library.section(".plt")
    slots = []
    for _place, info, _addend in library.rows(".rela.plt", RELOCATION):
        kind = info & 0xFFFFFFFF
        if kind == JUMP_SLOT[library.machine]:
            slots.append(dynamic[info >> 32])
        elif kind not in THREAD_LOCAL[library.machine]:
            raise TrimError(f".rela.plt has the relocation {kind}")
    first = plt.address + PLT_HEADER[library.machine]
    if plt.size - PLT_HEADER[library.machine] - PLT_ENTRY * len(slots) not in (0, 32):  # 32: for thread-local variables
        raise TrimError(".plt has another size than its relocations say")
    stubs = first + PLT_ENTRY * np.arange(len(slots), dtype=np.int64)
    targets = np.unique(np.concatenate([starts, stubs]))

    roots = {symbol.value for symbol in dynamic if symbol.defined and symbol.name in {PREFIX + name for name in KEPT}}
    if len(roots) != len(KEPT):
        raise TrimError("it lacks a function that mpool calls")
    needed: set[str] = set()
    for _place, info, addend in library.rows(".rela.dyn", RELOCATION):
        kind, symbol = info & 0xFFFFFFFF, dynamic[info >> 32]
        if kind in RELATIVE_AND_ABSOLUTE[library.machine]:
            if info >> 32 and not symbol.defined:
                needed.add(symbol.name)
            roots.add((symbol.value if info >> 32 else 0) + addend)
        elif kind not in THREAD_LOCAL[library.machine]:
            raise TrimError(f".rela.dyn has the relocation {kind}")

    # edges between functions; code that belongs to none (owner -1) counts as reachable
    edges: dict[int, list[int]] = {}
    for name in (".init", ".fini", ".text"):
        code = library.section(name)
        find = x86_references if library.machine == X86_64 else arm_references
        places, found = find(library.array(code), code.address, targets)
        owners = np.searchsorted(starts, places, "right") - 1
        owners[(owners >= 0) & (places >= ends[owners])] = -1
        for owner, target in zip(owners.tolist(), found.tolist()):
            edges.setdefault(int(starts[owner]) if owner >= 0 else -1, []).append(target)
    # the compiler splits functions: parts have the name of the whole and a suffix
    parts: dict[str, list[int]] = {}
    for address, here in names.items():
        for name in here:
            parts.setdefault(name.partition(".")[0], []).append(address)

    todo, seen = [-1, *roots], set()
    while todo:
        address = todo.pop()
        if address in seen:
            continue
        seen.add(address)
        if first <= address < first + PLT_ENTRY * len(slots):
            called = slots[(address - first) // PLT_ENTRY]
            if called.defined:
                todo.append(called.value)
            else:
                needed.add(called.name)
            continue
        todo += edges.get(address, [])
        for name in names.get(address, []):
            todo += parts.get(name.partition(".")[0], [])
    return functions, [function.value in seen for function in functions], needed


def blank(library: Library, functions: list[Symbol], live: list[bool]) -> None:
    """Overwrite the functions that are not reachable and the table of symbols that only debuggers use, and export these
    functions no longer."""
    text = library.section(".text")
    dead = np.zeros(text.size, bool)
    for state in (False, True):  # a function may have two names, or two sizes
        for function, kept in zip(functions, live):
            if kept == state and text.address <= function.value < text.address + text.size:
                dead[function.value - text.address:function.value - text.address + function.size] = not kept
    code = library.array(text).copy()
    code[dead] = np.resize(np.frombuffer(TRAP[library.machine], np.uint8), text.size)[dead]
    library.bytes[text.offset:text.offset + text.size] = code.tobytes()
    gone = {function.value for function, kept in zip(functions, live) if not kept} - {
        function.value for function, kept in zip(functions, live) if kept}
    table = library.section(".dynsym")
    for index, symbol in enumerate(library.symbols(".dynsym", ".dynstr")):
        if symbol.defined and symbol.type == STT_FUNC and symbol.value in gone:
            undefined = struct.pack("<BBHQQ", STB_WEAK << 4 | STT_FUNC, 0, 0, 0, 0)  # dlsym does not find it
            library.bytes[table.offset + 24 * index + 4:table.offset + 24 * index + 24] = undefined
    for name in (".symtab", ".strtab"):
        section = library.section(name)
        library.bytes[section.offset:section.offset + section.size] = bytes(section.size)
        library.bytes[section.header:section.header + 64] = bytes(64)  # SHT_NULL


def drop(library: Library, names: set[str], needed: set[str]) -> None:
    """Let the library no longer require other libraries. ``needed``: names that reachable code calls."""
    strings, dynamic = library.section(".dynstr"), library.section(".dynamic")
    versions, table = library.section(".gnu.version"), library.section(".gnu.version_r")

    # a list of libraries, each with a list of versions
    indices: set[int] = set()
    found: set[str] = set()
    at, before, first, count = table.offset, 0, table.offset, 0
    while True:
        _version, auxiliaries, file, auxiliary, following = struct.unpack_from("<HHIII", library.bytes, at)
        if (name := library.text(strings.offset + file)) in names:
            found.add(name)
            for _ in range(auxiliaries):
                place = at + auxiliary
                indices.add(library.number("<H", place + 6))
                auxiliary += library.number("<I", place + 12)
            if before:
                distance = at + following - before if following else 0
                struct.pack_into("<I", library.bytes, before + 12, distance)
            else:
                first = at + following
        else:
            before, count = at, count + 1
        if not following:
            break
        at += following
    if found != names or not count:
        raise TrimError("which symbols come from which library is unknown")
    struct.pack_into("<QQQ", library.bytes, table.header + 16, table.address + first - table.offset, first,
                     table.size - (first - table.offset))
    struct.pack_into("<I", library.bytes, table.header + 44, count)  # sh_info

    symbols = library.section(".dynsym")
    for index, symbol in enumerate(library.symbols(".dynsym", ".dynstr")):
        place = versions.offset + 2 * index
        if not symbol.defined and library.number("<H", place) & 0x7FFF in indices:
            if symbol.name in needed:
                raise TrimError(f"code that mpool can reach calls {symbol.name}")
            struct.pack_into("<H", library.bytes, place, VERSION_GLOBAL)
            library.bytes[symbols.offset + 24 * index + 4] = STB_WEAK << 4 | symbol.type

    entries = []
    for tag, value in library.rows(".dynamic", "<QQ"):
        if tag == DT_NEEDED and library.text(strings.offset + value) in names:
            continue
        if tag == DT_VERNEED:
            value += first - table.offset
        entries.append((tag, count if tag == DT_VERNEEDNUM else value))
    blob = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    library.bytes[dynamic.offset:dynamic.offset + dynamic.size] = blob.ljust(dynamic.size, b"\0")


def rename(library: Library) -> None:
    """Change the name under which the dynamic linker knows the library. Another module that requires the published
    library would otherwise get this one, if it is open."""
    strings = library.section(".dynstr")
    at = next((strings.offset + value for tag, value in library.rows(".dynamic", "<QQ") if tag == DT_SONAME), 0)
    if not at or library.text(at) != SONAME:
        raise TrimError(f"its name is not {SONAME}")
    used = {strings.offset + row[0] for row in library.rows(".dynsym", SYMBOL)}
    if used & set(range(at, at + len(SONAME))):
        raise TrimError("a symbol shares the text of its name")
    library.bytes[at:at + len(SONAME)] = NEW_SONAME.encode()


def requirements(library: Library) -> set[str]:
    """Return the names of the libraries that a library requires."""
    strings = library.section(".dynstr").offset
    return {library.text(strings + value) for tag, value in library.rows(".dynamic", "<QQ") if tag == DT_NEEDED}


def trim(data: bytes, beside: set[str]) -> bytes:
    """Return a library without the code that mpool cannot reach.

    Args:
        data: the bytes of libscipy_openblas.so.
        beside: libraries that its wheel brings along. None of them is required afterwards.

    Raises:
        TrimError: the library has another form than expected, or reachable code needs one of these libraries.
    """
    try:
        library = Library(data)
        functions, live, needed = reachable(library)
        blank(library, functions, live)
        drop(library, beside & requirements(library), needed)
        rename(library)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise TrimError(f"its tables are damaged: {error}") from None
    return bytes(library.bytes)


def main() -> None:
    """Run the command line."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source = Path(sys.argv[1])
    try:
        trimmed = trim(source.read_bytes(), {path.name for path in source.parent.glob("*.so*")} - {source.name})
    except TrimError as error:
        sys.exit(f"trim_openblas: {source}: {error}")
    Path(sys.argv[2]).write_bytes(trimmed)


if __name__ == "__main__":
    main()
