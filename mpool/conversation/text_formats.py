"""Regular expressions of the values of ``format`` in JSON schemas, for texts that validators accept.

Those of llguidance allow days that do not exist, leap seconds at any time, and host names of any length.

Sources:
    RFC 3339 (dates, times; appendix A: durations), RFC 1123 and RFC 5321 (host names, e-mail addresses), RFC 4291
    (IPv6), RFC 3986 (URIs), RFC 6901 (JSON pointers);
    https://github.com/json-schema-org/JSON-Schema-Test-Suite for what validators agree on: 23:59:60 is the only leap
    second, and no label has ``--`` in its third and fourth position.
"""

from __future__ import annotations

#: Formats that do not restrict texts: those of numbers, and those that only describe a text.
FREE = frozenset(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double",
                  "password", "binary"))

# ---- dates and times -------------------------------------------------------------------------------------------------

#: Two digits whose number is a multiple of 4, without 00.
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
#: 0001 to 9999: Python's datetime has no year 0.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = ("(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
        "|02-(?:0[1-9]|1[0-9]|2[0-8]))")
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_FRACTION, _OFFSET = r"(?:\.[0-9]{1,9})?", f"(?:[Zz]|[+-]{_HOUR}:[0-5][0-9])"
_LEAP_SECOND = rf"23:59:60{_FRACTION}(?:[Zz]|[+-]00:00)"
_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}"
_DATE_TIME = f"(?:{_DATE}[Tt]{_TIME}|{_YEAR}-(?:06-30|12-31)[Tt]{_LEAP_SECOND})"
_N = "[0-9]{1,9}"
_DURATION_TIME = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION = (f"P(?:(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_N}W)")

# ---- names and addresses ---------------------------------------------------------------------------------------------

_ALNUM, _INNER = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
#: 1 to 63 characters.
_LABEL = f"{_ALNUM}(?:{_ALNUM}|{_INNER}{_ALNUM}|{_INNER}{_INNER}{_ALNUM}|{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM})" \
         f"{_INNER}{{0,58}}{_ALNUM})?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Return the regular expression of IPv6 addresses: eight groups, of which ``::`` replaces one or more."""
    found = [f"(?:{_GROUP}:){{7}}{_GROUP}", f"(?:{_GROUP}:){{6}}{_IPV4}"]
    for count in range(8):  # groups before "::"
        left = "" if count == 0 else _GROUP + f"(?::{_GROUP}){{{count - 1}}}" * (count > 1)
        right = f"(?:{_GROUP}(?::{_GROUP}){{0,{6 - count}}})?" if count < 7 else ""
        found.append(f"{left}::{right}")
        if count < 6:
            found.append(f"{left}::(?:{_GROUP}:){{0,{5 - count}}}{_IPV4}")
    return f"(?:{'|'.join(found)})"


_IPV6 = _ipv6()
_LOCAL = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_LOCAL}(?:\.{_LOCAL})*@(?:{_HOST}|\[{_IPV4}\])"
_UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

# ---- references ------------------------------------------------------------------------------------------------------

_NAME = "[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{2}"
_CHAR = f"(?:{_NAME}|[:@])"
_PORT = "(?:[0-9]{0,4}|[1-5][0-9]{4}|6[0-4][0-9]{3})"
_AUTHORITY = rf"//(?:(?:{_NAME}|:)*@)?(?:\[{_IPV6}\]|(?:{_NAME})*)(?::{_PORT})?(?:/{_CHAR}*)*"
_ABSOLUTE, _ROOTLESS = f"/(?:{_CHAR}+(?:/{_CHAR}*)*)?", f"{_CHAR}+(?:/{_CHAR}*)*"
_TAIL = rf"(?:\?(?:{_CHAR}|[/?])*)?(?:#(?:{_CHAR}|[/?])*)?"
_SCHEME = "[a-zA-Z][a-zA-Z0-9+.-]*:"
_URI = f"{_SCHEME}(?:{_AUTHORITY}|{_ABSOLUTE}|{_ROOTLESS})?{_TAIL}"
_RELATIVE = f"(?:{_AUTHORITY}|{_ABSOLUTE}|(?:{_NAME}|@)+(?:/{_CHAR}*)*)?{_TAIL}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

#: Format -> the regular expressions that its texts match, all of them.
PATTERNS = {name: tuple(f"^(?:{one})$" for one in patterns) for name, patterns in {
    "date": (_DATE,), "time": (f"{_TIME}|{_LEAP_SECOND}",), "date-time": (_DATE_TIME,), "duration": (_DURATION,),
    "hostname": (_HOST, ".{1,253}"), "email": (_EMAIL, "[^@]{1,64}@.{1,189}"), "ipv4": (_IPV4,), "ipv6": (_IPV6,),
    "uuid": (_UUID,), "uri": (_URI,), "uri-reference": (f"(?:{_URI}|{_RELATIVE})",), "json-pointer": (_POINTER,),
    "relative-json-pointer": (f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",)}.items()}

__all__ = ["FREE", "PATTERNS"]
