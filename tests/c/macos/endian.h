/* endian.h: NumPy's headers for Linux include it; macOS has its content in another place. */
#include <machine/endian.h>
