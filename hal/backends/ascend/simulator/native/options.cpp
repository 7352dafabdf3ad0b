// Versions and switches that torch_npu asks for or sets; and what no simulator can run, which fails by name.
#include "simulator.h"

#include <cstdio>
#include <cstring>

namespace {

constexpr int OPTIONS = 64;
int64_t system_options[OPTIONS];
int saturation_mode = 1;  // INF_NAN mode, as the devices start

struct PackageVersion {
    char version[128], major[64], minor[64], release[64], patch[64], reserved[128];
};

void put(char* target, size_t room, const std::string& text) { snprintf(target, room, "%s", text.c_str()); }

aclError refuse(const char* what, const char* detail = "") {
    char message[512];
    snprintf(message, sizeof message, "simulated CANN: %s%s%s: no device code can run here", what, *detail ? " " : "", detail);
    sim_set_error(message);
    return FAILURE;
}

}  // namespace

EXPORT aclError aclsysGetCANNVersion(int, PackageVersion* version) {
    if (!sim_ready()) return FAILURE;
    memset(version, 0, sizeof *version);
    const auto& text = sim_configuration().cann;
    put(version->version, sizeof version->version, text);
    char* parts[] = {version->major, version->minor, version->release};
    size_t start = 0;
    for (char* part : parts) {
        const size_t end = text.find('.', start);
        put(part, 64, start > text.size() ? "" : text.substr(start, end - start));
        start = end == std::string::npos ? text.size() + 1 : end + 1;
    }
    return SUCCESS;
}
EXPORT aclError aclsysGetVersionStr(char*, char* version) {
    if (!sim_ready()) return FAILURE;
    put(version, 128, sim_configuration().cann);
    return SUCCESS;
}
EXPORT aclError aclrtGetVersion(int* major, int* minor, int* patch) {
    if (!sim_ready()) return FAILURE;
    *major = *minor = *patch = 0;
    sscanf(sim_configuration().cann.c_str(), "%d.%d.%d", major, minor, patch);
    return SUCCESS;
}

EXPORT aclError aclrtGetSysParamOpt(int option, int64_t* value) {
    *value = option >= 0 && option < OPTIONS ? system_options[option] : 0;
    return SUCCESS;
}
EXPORT aclError aclrtSetSysParamOpt(int option, int64_t value) {
    if (option < 0 || option >= OPTIONS) return INVALID_PARAM;
    system_options[option] = value;
    return SUCCESS;
}
EXPORT aclError aclrtCtxGetSysParamOpt(int option, int64_t* value) { return aclrtGetSysParamOpt(option, value); }
EXPORT aclError aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
EXPORT aclError aclrtSetDeviceSatMode(int mode) {
    saturation_mode = mode;
    return SUCCESS;
}
EXPORT aclError aclrtGetDeviceSatMode(int* mode) {
    *mode = saturation_mode;
    return SUCCESS;
}
EXPORT aclError aclrtSetStreamOverflowSwitch(void*, uint32_t) { return SUCCESS; }
EXPORT aclError aclrtGetStreamOverflowSwitch(void*, uint32_t* on) {
    *on = 0;
    return SUCCESS;
}
EXPORT aclError aclSetCompileopt(int, const char*) { return SUCCESS; }
EXPORT size_t aclGetCompileoptSize(int) { return sizeof "disable"; }
EXPORT aclError aclGetCompileopt(int, char* value, size_t room) {
    put(value, room, "disable");
    return SUCCESS;
}
EXPORT aclError aclopSetCompileFlag(int) { return SUCCESS; }
EXPORT void aclAppLog(int, const char*, const char*, uint32_t, const char*, ...) {}

// The operators of before aclnn, and kernels that a program brings itself.
EXPORT aclError aclopCompileAndExecute(const char* name, ...) { return refuse("the legacy operator", name); }
EXPORT aclError aclopCompileAndExecuteV2(const char* name, ...) { return refuse("the legacy operator", name); }
EXPORT aclError rtKernelLaunch() { return refuse("rtKernelLaunch"); }
EXPORT aclError rtDevBinaryRegister() { return refuse("rtDevBinaryRegister"); }
EXPORT aclError rtFunctionRegister() { return refuse("rtFunctionRegister"); }
EXPORT aclError aclrtBinaryLoadFromData() { return refuse("aclrtBinaryLoadFromData"); }
EXPORT aclError aclrtBinaryGetFunction() { return refuse("aclrtBinaryGetFunction"); }

// Link symbols of the wheel that nothing above provides fail by name as well (generated).
EXPORT long sim_not_simulated(const char* name) {
    refuse(name);
    return NOT_SUPPORTED;
}
