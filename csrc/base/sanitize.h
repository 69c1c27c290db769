/* sanitize.h: annotations for the sanitizers; empty in ordinary builds.
 *
 * MP_GUARD(address, bytes) makes AddressSanitizer report every access to a range, such as a block's header or the free
 * part of an arena; MP_UNGUARD allows access again. MP_SANITIZED is 1 in a sanitizer build, where every allocation must
 * come from the sanitizer's malloc. */
#ifndef MP_BASE_SANITIZE_H
#define MP_BASE_SANITIZE_H

#if defined(__SANITIZE_ADDRESS__)
#define MP_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define MP_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MP_ASAN 1
#elif __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define MP_SANITIZED 1
#endif
#endif

#ifdef MP_ASAN
#define MP_SANITIZED 1
#include <sanitizer/asan_interface.h>
#define MP_GUARD(address, bytes) __asan_poison_memory_region(address, bytes)
#define MP_UNGUARD(address, bytes) __asan_unpoison_memory_region(address, bytes)
#else
#define MP_GUARD(address, bytes) ((void)(address))
#define MP_UNGUARD(address, bytes) ((void)(address))
#endif
#ifndef MP_SANITIZED
#define MP_SANITIZED 0
#endif

#endif
