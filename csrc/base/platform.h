/* platform.h: the system that base/ calls. Included by files of base/ only: the other tiers do not know the system.
 *
 * MP_LINUX selects calls that only Linux has. A build with -DMP_PORTABLE uses on Linux what the other systems use, so
 * that the tests run this code on Linux (the variant `portable` of tests/c/build.py). */
#ifndef MP_BASE_PLATFORM_H
#define MP_BASE_PLATFORM_H

#if defined(__linux__) && !defined(MP_PORTABLE)
#define MP_LINUX 1
#else
#define MP_LINUX 0
#endif

#endif
