/* Frames, messages and specs as bytes: incomplete or corrupted input is refused. */
#include "spec_fixture.h"
#include "isolation/spec_codec.h"
#include "isolation_scene.h"

MP_TEST(isolation_frames_arrive_as_sent) {
    static uint8_t sent[MP_FRAME_MAX], got[MP_FRAME_MAX];
    mp_test_random random = {1};
    pair p;
    pair_init(&p);
    for (int i = 0; i < 400; i++) { /* wraps around the ring several times */
        size_t bytes = i % 7 == 0 ? MP_FRAME_MAX : mp_test_random_u64(&random) % 5000;
        for (size_t k = 0; k < bytes; k++)
            sent[k] = (uint8_t)mp_test_random_u64(&random);
        mp_channel *from = i % 2 ? &p.parent : &p.child, *to = i % 2 ? &p.child : &p.parent;
        mp_frame frame;
        MP_CHECK(!mp_channel_waiting(to));
        MP_CHECK(mp_channel_send(from, MP_FRAME_STEP, i % 3 == 0, sent, bytes));
        MP_CHECK(mp_channel_receive(to, false, &frame, got));
        MP_CHECK_INT(frame.bytes, bytes);
        MP_CHECK_INT(frame.last, i % 3 == 0);
        MP_CHECK(memcmp(sent, got, bytes) == 0);
    }
    mp_frame frame;
    MP_CHECK(!mp_channel_receive(&p.parent, false, &frame, got)); /* `never` reports that no message will come */
    MP_CHECK(p.parent.broken);
    free(p.page);
}

MP_TEST(isolation_every_flipped_byte_of_a_frame_is_detected) {
    static uint8_t data[100], got[MP_FRAME_MAX];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 7);
    enum { COST = 128 }; /* header, 100 bytes, padding */
    for (size_t at = 0; at < COST; at++)
        for (int bit = 0; bit < 8; bit++) {
            pair p;
            mp_frame frame;
            pair_init(&p);
            MP_CHECK(mp_channel_send(&p.child, MP_FRAME_STEP, true, data, sizeof data));
            p.page->replies.data[at] ^= (uint8_t)(1 << bit);
            bool ok = mp_channel_receive(&p.parent, false, &frame, got);
            if (at < sizeof(mp_frame) + sizeof data)
                MP_CHECK(!ok && p.parent.broken && p.parent_error.code == MP_RECV);
            else
                MP_CHECK(ok && memcmp(got, data, sizeof data) == 0); /* a changed byte of the padding has no effect */
            free(p.page);
        }
}

MP_TEST(isolation_torn_repeated_and_forged_frames_are_refused) {
    static uint8_t data[64], got[MP_FRAME_MAX];
    static const uint64_t forged[] = {1, 4, 8, 16, 23, MP_RING_BYTES + 8, UINT64_MAX, UINT64_MAX - 7, 1ull << 63};
    mp_frame frame;
    pair p;
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) { /* an impossible write position */
        pair_init(&p);
        atomic_store(&p.page->replies.head, forged[i]);
        MP_CHECK(!mp_channel_receive(&p.parent, false, &frame, got));
        MP_CHECK(p.parent.broken && p.parent_error.code == MP_RECV);
        free(p.page);
    }
    for (size_t cut = 0; cut < 88; cut += 8) { /* a frame published before it was completely written */
        pair_init(&p);
        MP_CHECK(mp_channel_send(&p.child, MP_FRAME_STEP, true, data, sizeof data));
        memset(p.page->replies.data + cut, 0xAA, 88 - cut);
        MP_CHECK(!mp_channel_receive(&p.parent, false, &frame, got));
        free(p.page);
    }
    for (uint32_t length = 0; length < 200; length++) { /* a wrong length with a valid checksum */
        pair_init(&p);
        mp_frame made = {length == 199 ? UINT32_MAX : length, MP_FRAME_STEP, 1, 1, 0};
        uint8_t room[256] = {0};
        if (made.bytes < sizeof room)
            made.checksum = mp_frame_checksum(&made, room);
        memcpy(p.page->replies.data, &made, sizeof made);
        atomic_store(&p.page->replies.head, 88);
        bool ok = mp_channel_receive(&p.parent, false, &frame, got);
        MP_CHECK(ok == (length <= 64));
        free(p.page);
    }
    pair_init(&p); /* a repeated sequence number */
    MP_CHECK(mp_channel_send(&p.child, MP_FRAME_STEP, true, data, sizeof data));
    MP_CHECK(mp_channel_receive(&p.parent, false, &frame, got));
    memcpy(p.page->replies.data + 88, p.page->replies.data, 88);
    atomic_store(&p.page->replies.head, 176);
    MP_CHECK(!mp_channel_receive(&p.parent, false, &frame, got));
    MP_CHECK_HAS(p.parent_error.message, "not the next one");
    free(p.page);
    static const uint64_t read[] = {8, 4, UINT64_MAX, 1ull << 40}; /* a read position beyond the written bytes */
    for (size_t i = 0; i < sizeof read / sizeof *read; i++) {
        pair_init(&p);
        atomic_store(&p.page->requests.tail, read[i]);
        MP_CHECK(!mp_channel_send(&p.parent, MP_FRAME_PLAN, true, data, sizeof data));
        MP_CHECK(p.parent.broken);
        free(p.page);
    }
}

MP_TEST(isolation_errors_are_transferred_as_printable_text) {
    static mp_wire_out out;
    static mp_wire_in in;
    static const mp_status numeric[] = {MP_NUMERIC, MP_OK};
    mp_error sent, got;
    pair p;
    pair_init(&p);
    mp_fail_hint(&sent, MP_NUMERIC, "Raise\n`limit`", "NaN \x01\x02 in \xC3\xA4 \x7F");
    memcpy(sent.field, "\xFF\xFE", 3);
    mp_wire_begin(&out, &p.child, MP_FRAME_READY);
    mp_put_error(&out, MP_NUMERIC, &sent);
    MP_CHECK(mp_wire_end(&out) && mp_wire_receive(&in, &p.parent, false));
    MP_CHECK_INT(mp_get_error(&in, numeric, &got), MP_NUMERIC);
    MP_CHECK(mp_wire_done(&in));
    MP_CHECK_STR(got.message, "NaN ?? in \xC3\xA4 ?");
    MP_CHECK_STR(got.field, "??");
    MP_CHECK_STR(got.hint, "Raise?`limit`");
    mp_wire_begin(&out, &p.child, MP_FRAME_READY);
    mp_put_u32(&out, 7777); /* an unknown status */
    uint8_t rest[64] = {0};
    mp_put(&out, rest, sizeof rest);
    MP_CHECK(mp_wire_end(&out) && mp_wire_receive(&in, &p.parent, false));
    mp_get_error(&in, numeric, &got);
    MP_CHECK(!mp_wire_done(&in) && p.parent.broken);
    free(p.page);
}

/* ---- specs ------------------------------------------------------------------------------------------------------- */

static void check_same_spec(const mp_spec *a, const mp_spec *b) {
    uint8_t *first, *second;
    size_t first_size, second_size;
    mp_error error;
    MP_CHECK_OK(mp_spec_encode(a, &first, &first_size, &error), &error);
    MP_CHECK_OK(mp_spec_encode(b, &second, &second_size, &error), &error);
    MP_CHECK_INT(first_size, second_size);
    MP_CHECK(memcmp(first, second, first_size) == 0);
    mp_free(first);
    mp_free(second);
}

static mp_spec *full_spec(void) {
    static const mp_dtype types[] = {MP_Q8_0, MP_F32};
    mp_spec *spec = tiny_decoder_spec(types, 2, 5), *copy;
    mp_error error;
    MP_CHECK_OK(copy_spec(spec, &copy, &error), &error);
    mp_spec_unpin(spec);
    static const int64_t integers[] = {-1, 1ll << 60};
    static const double reals[] = {0.5, -1e300};
    static const uint8_t bools[] = {1, 0, 1};
    static const uint64_t offsets[] = {0, 3, 3, 5};
    const struct {
        const char *key;
        mp_value value;
    } values[] = {
        {"x.ints", {.type = MP_VALUE_INTS, .gguf_type = 11, .count = 2, .as.integers = integers}},
        {"x.floats", {.type = MP_VALUE_FLOATS, .gguf_type = 12, .count = 2, .as.reals = reals}},
        {"x.bools", {.type = MP_VALUE_BOOLS, .gguf_type = 7, .count = 3, .as.bools = bools}},
        {"x.text", {.type = MP_VALUE_STRING, .gguf_type = 8, .count = 5, .as.string = "a\0b\xFF!"}},
        {"x.texts", {.type = MP_VALUE_STRINGS, .gguf_type = 8, .count = 3, .as.strings = {"abcde", offsets}}},
        {"x.bool", {.type = MP_VALUE_BOOL, .gguf_type = 7, .count = 1, .as.integer = 1}},
        {"tokenizer.left.out", {.type = MP_VALUE_INT, .gguf_type = 4, .count = 1, .as.integer = 3}},
    };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        MP_CHECK_OK(mp_spec_set(copy, values[i].key, &values[i].value, &error), &error);
    MP_CHECK_OK(mp_spec_add_file(copy, "/nowhere/second", &error), &error);
    mp_file_id id = {1, 2, 3, 4, 5};
    MP_CHECK(mp_spec_same_file(copy, 1, &id));
    mp_spec_freeze(copy);
    return copy;
}

MP_TEST(isolation_specs_are_decoded_as_encoded) {
    mp_spec *spec = full_spec(), *decoded;
    uint8_t *bytes;
    size_t size;
    mp_error error;
    MP_CHECK_OK(mp_spec_encode(spec, &bytes, &size, &error), &error);
    MP_CHECK_OK(mp_spec_decode(bytes, size, &decoded, &error), &error);
    check_same_spec(spec, decoded);
    MP_CHECK(!mp_spec_find(decoded, "tokenizer.left.out") && mp_spec_find(decoded, "x.texts"));
    MP_CHECK_INT(mp_spec_find(decoded, "x.text")->count, 5);
    mp_file_id id = {1, 2, 3, 4, 5}, other = {1, 2, 3, 5, 5}, owned = {1, 2, 3, 4, 6};
    MP_CHECK(mp_spec_same_file(decoded, 1, &id) && !mp_spec_same_file(decoded, 1, &other));
    MP_CHECK(mp_spec_same_file(decoded, 1, &owned));
    mp_spec_unpin(decoded);
    mp_spec_unpin(spec);
    mp_free(bytes);
}

MP_TEST_SECONDS(isolation_bytes_that_are_not_a_spec_are_refused, 60) {
    mp_spec *spec = full_spec(), *decoded;
    uint8_t *bytes;
    size_t size;
    mp_error error;
    int taken = 0, refused = 0;
    MP_CHECK_OK(mp_spec_encode(spec, &bytes, &size, &error), &error);
    uint8_t *exact = malloc(size);
    for (size_t cut = 0; cut < size; cut += cut < 2000 ? 1 : 37) {
        uint8_t *shorter = malloc(cut + 1); /* ASan reports reads past this copy */
        memcpy(shorter, bytes, cut);
        MP_CHECK(mp_spec_decode(shorter, cut, &decoded, &error) != MP_OK && error.message[0]);
        free(shorter);
    }
    mp_test_random random = {3};
    for (size_t at = 0; at < size; at++) {
        memcpy(exact, bytes, size);
        exact[at] ^= (uint8_t)(1 + mp_test_random_u64(&random) % 255);
        if (mp_spec_decode(exact, size, &decoded, &error) == MP_OK) {
            mp_spec_unpin(decoded);
            taken++;
        } else {
            MP_CHECK(error.message[0]);
            refused++;
        }
    }
    MP_CHECK(taken > 0 && refused > 0);
    free(exact);
    mp_free(bytes);
    mp_spec_unpin(spec);
}
