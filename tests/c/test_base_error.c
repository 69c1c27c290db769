/* test_base_error.c: base/error.h. */
#include <errno.h>

#include "mp_test.h"

/* Returns true if `text` is valid UTF-8 and does not end inside a character. */
static bool is_utf8(const char *text) {
    for (const uint8_t *at = (const uint8_t *)text; *at;) {
        int more = *at < 0x80 ? 0 : (*at & 0xE0) == 0xC0 ? 1 : (*at & 0xF0) == 0xE0 ? 2 : (*at & 0xF8) == 0xF0 ? 3 : -1;
        if (more < 0)
            return false;
        for (at++; more; more--, at++)
            if ((*at & 0xC0) != 0x80)
                return false;
    }
    return true;
}

MP_TEST(base_error_rows_are_complete_and_unique) {
    int count;
    const mp_status_row *rows = mp_status_rows(&count);
    MP_CHECK(count >= 25);
    for (int i = 0; i < count; i++) {
        MP_CHECK(rows[i].name[0] && rows[i].text[0]);
        MP_CHECK(mp_status_find(rows[i].code) == &rows[i]);
        if (rows[i].code != MP_OK)
            MP_CHECK(rows[i].python_class[0] && rows[i].builtin[0]);
        for (int j = 0; j < i; j++)
            MP_CHECK(rows[i].code != rows[j].code && strcmp(rows[i].name, rows[j].name) != 0);
    }
    MP_CHECK_INT(mp_status_find((mp_status)9999)->code, MP_INTERNAL);
}

MP_TEST(base_error_fail_fills_everything) {
    mp_error error;
    memset(&error, 0x55, sizeof(error));
    MP_CHECK_INT(mp_fail(&error, MP_TIMEOUT, "after %d ms", 30), MP_TIMEOUT);
    MP_CHECK_INT(error.code, MP_TIMEOUT);
    MP_CHECK_INT(error.offset, -1);
    MP_CHECK_STR(error.message, "after 30 ms");
    MP_CHECK(!error.file[0] && !error.field[0] && !error.got[0] && !error.allowed[0] && !error.hint[0]);
    MP_CHECK_INT(mp_fail(NULL, MP_TIMEOUT, "ignored"), MP_TIMEOUT);
    MP_CHECK_INT(mp_fail_hint(&error, MP_OVERLOADED, "Wait", "%d requests", 3), MP_OVERLOADED);
    MP_CHECK_INT(error.code, MP_OVERLOADED);
    MP_CHECK_STR(error.message, "3 requests");
    MP_CHECK_STR(error.hint, "Wait");
    MP_CHECK_INT(mp_fail_hint(NULL, MP_TIMEOUT, "Wait", "ignored"), MP_TIMEOUT);
    mp_fail(&error, MP_TIMEOUT, "later");
    MP_CHECK_STR(error.hint, "");
    mp_error_clear(&error);
    MP_CHECK_INT(error.code, MP_OK);
    MP_CHECK_STR(error.message, "");
    mp_error_clear(NULL);
}

MP_TEST(base_error_file_names_position_field_and_allowed_values) {
    mp_error error;
    mp_status status = mp_fail_file(&error, MP_FORMAT, "m.gguf", 24, "tensor_count", "at most 65536", "%d", 70000);
    MP_CHECK_INT(status, MP_FORMAT);
    MP_CHECK_STR(error.message, "m.gguf at byte 24: tensor_count is 70000, allowed: at most 65536");
    MP_CHECK_STR(error.file, "m.gguf");
    MP_CHECK_STR(error.field, "tensor_count");
    MP_CHECK_STR(error.got, "70000");
    MP_CHECK_STR(error.allowed, "at most 65536");
    MP_CHECK_INT(error.offset, 24);
    MP_CHECK_INT(mp_fail_file(&error, MP_LIMIT, "m", -1, "size", NULL, "%s", "big"), MP_LIMIT);
    MP_CHECK_STR(error.message, "m: size is big");
    MP_CHECK_INT(mp_fail_file(NULL, MP_LIMIT, NULL, -1, NULL, NULL, "%s", "x"), MP_LIMIT);
    mp_fail_file(&error, MP_FORMAT, NULL, -1, "key", "text", "%d", 1);
    MP_CHECK_STR(error.message, "key is 1, allowed: text");
}

/* Characters of 1 to 4 bytes, shifted so that a text is truncated at each byte of a character. */
MP_TEST(base_error_truncates_between_characters) {
    static const char *const characters[] = {"a", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"};
    for (int c = 0; c < 4; c++) {
        for (int shift = 0; shift < 4; shift++) {
            char text[2048] = "";
            memset(text, 'x', (size_t)shift);
            text[shift] = 0;
            while (strlen(text) < 1500)
                strcat(text, characters[c]);
            mp_error error;
            mp_fail(&error, MP_INTERNAL, "%s", text);
            size_t length = strlen(error.message);
            MP_CHECK(length < sizeof(error.message) && length > sizeof(error.message) - 5);
            MP_CHECK(strncmp(error.message, text, length) == 0);
            MP_CHECK(is_utf8(error.message));
            mp_fail_file(&error, MP_FORMAT, text, 7, text, text, "%s", text);
            MP_CHECK(is_utf8(error.message) && is_utf8(error.file) && is_utf8(error.field));
            MP_CHECK(is_utf8(error.got) && is_utf8(error.allowed));
            MP_CHECK_HAS(error.message, "allowed: ");
        }
    }
}

MP_TEST(base_error_trim_handles_every_tail) {
    static const struct {
        const char *text, *trimmed;
    } rows[] = {
        {"", ""},
        {"ab", "ab"},
        {"a\xC3", "a"},
        {"\xE2\x82", ""},
        {"a\xE2", "a"},
        {"a\xF0\x9F\x98", "a"},
        {"\xE2\x82\xAC", "\xE2\x82\xAC"},
        {"a\x80\x80\x80\x80", "a\x80\x80\x80\x80"}, /* not UTF-8 at all: unchanged */
        {"a\xFF", "a\xFF"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char text[16];
        strcpy(text, rows[i].text);
        mp_text_trim(text);
        MP_CHECK_STR(text, rows[i].trimmed);
    }
}
