"""Small wheels for tests of references to packages."""

import zipfile
from pathlib import Path


def write_wheel(folder: Path, name: str, members: dict[str, bytes | str], version: str = "1.0") -> Path:
    """Write a wheel with the given members, and return its path."""
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    meta = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in {**members, **meta}.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in archive.namelist()))
    return path
