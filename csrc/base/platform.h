/* platform.h: selects between the system calls of Linux and those of other systems. Only files of base/ may include it.
 *
 * MP_LINUX is 1 where the calls that only Linux has may be used. A build with -DMP_PORTABLE uses the calls of other
 * systems on Linux, so that the tests run this code there (the variant `portable` of tests/c/build.py). */
#ifndef MP_BASE_PLATFORM_H
#define MP_BASE_PLATFORM_H

#if defined(__linux__) && !defined(MP_PORTABLE)
#define MP_LINUX 1
#else
#define MP_LINUX 0
#endif

#endif
