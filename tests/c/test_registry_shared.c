/* Objects that all registries of the process share (shared.h). */
#include "mp_test.h"
#include "registry/shared.h"

MP_TEST(registry_shared_object_lives_from_its_first_user_to_its_last) {
    mp_shared_slot slot = {0};
    int first, second;
    MP_CHECK(!mp_shared_take(&slot));
    MP_CHECK(mp_shared_offer(&slot, &first) == &first);
    MP_CHECK(mp_shared_offer(&slot, &second) == &first); /* another thread was faster: the caller frees its object */
    MP_CHECK(mp_shared_take(&slot) == &first);
    for (int users = 3; users > 0; users--)
        MP_CHECK(mp_shared_drop(&slot) == (users == 1));
    MP_CHECK(!mp_shared_take(&slot));
    MP_CHECK(mp_shared_offer(&slot, &second) == &second);
    MP_CHECK(mp_shared_drop(&slot));
}
