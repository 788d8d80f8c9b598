/* SPDX-License-Identifier: Apache-2.0 */
/* features.c - `hitrainctl features`: the format's version of a store, and the features that it uses. */
#include "mount-helpers/ctl/ctl.h"

#include <blkid/blkid.h>
#include <sys/stat.h>

#include "mount-helpers/common/features.h"
#include "tiering/sys/mounts.h"
#include <hitrain/format.h>

/* What a program does that does not know the feature. */
static const char *const effect_words[HT_FEATURE_EFFECTS] = HT_FEATURE_WORDS;

/* The device of a mount, or the path itself if it is a device or a file. */
static int device_of(const char *path, char out[PATH_MAX])
{
    struct ht_mount_entry m;
    struct stat st;

    if (stat(path, &st) != 0)
        return ht_cmd_explain(path, -errno);
    bool mount = ht_mount_of_path(path, &m) == 0 && ht_mount_is_hitrain(&m) && !S_ISBLK(st.st_mode);
    if (!mount && S_ISDIR(st.st_mode))
        return ht_fail(-ENOTSUP, "%s is not on a hitrain mount; name a mount, or a device or file of a store", path);
    snprintf(out, PATH_MAX, "%s", mount ? m.source : path);
    return 0;
}

static void put_bit(struct ht_json *j, const struct ht_super_words *f, enum ht_feature_effect effect, uint64_t bit)
{
    bool used = ht_features_bits(f, effect) & bit, known = !(ht_features_unknown(f, effect) & bit);
    const struct ht_feature *own = ht_feature_of(effect, bit);
    char name[HT_FEATURE_NAME_MAX], since[HT_FEATURE_SINCE_MAX] = "";

    if (!ht_features_name(f, effect, bit, name, since))
        snprintf(name, sizeof(name), "bit-%d", __builtin_ctzll(bit));
    if (!j) {
        printf("%-15s %-5s %-9s ", name, used ? "yes" : "no", effect_words[effect]);
        if (own || known)
            puts(own ? own->text : "");
        else
            printf("this program does not know it: use %s%s\n", since[0] ? "hitrain " : "a newer version", since);
        return;
    }
    ht_json_object(j, NULL);
    ht_json_str(j, "name", name);
    ht_json_bool(j, "used", used);
    ht_json_bool(j, "known", known);
    ht_json_str(j, "older", effect_words[effect]);
    if (since[0])
        ht_json_str(j, "since", since);
    ht_json_end(j);
}

/* Those that this program has names for, and those that the store uses. */
static void put_bits(struct ht_json *j, const struct ht_super_words *f)
{
    for (enum ht_feature_effect e = 0; e < HT_FEATURE_EFFECTS; e++)
        for (unsigned i = 0; i < 64; i++) {
            uint64_t bit = UINT64_C(1) << i;
            bool used = ht_features_bits(f, e) & bit;
            if (used || ht_feature_of(e, bit))
                put_bit(j, f, e, bit);
        }
}

static bool can_open(const struct ht_super_words *f)
{
    return f->version == HT_FORMAT_VERSION && !ht_features_unknown(f, HT_FEATURE_REFUSES);
}

static void put_json(const char *device, const struct ht_super_words *f)
{
    char uuid[HT_UUID_TEXT_MAX];
    struct ht_json j;

    ht_cmd_json_begin(&j, "device", device);
    ht_json_str(&j, "uuid", ht_uuid_text(f->uuid, uuid));
    ht_json_str(&j, "label", f->label);
    ht_json_u64(&j, "version", f->version);
    ht_json_u64(&j, "known_version", HT_FORMAT_VERSION);
    ht_json_bool(&j, "can_open", can_open(f));
    ht_json_array(&j, "features");
    put_bits(&j, f);
    ht_json_end(&j);
    ht_json_end(&j);
}

static void put_for_people(const char *device, const struct ht_super_words *f)
{
    char uuid[HT_UUID_TEXT_MAX];

    ht_put_printable(device, stdout);
    printf(": store %s, format %u", ht_uuid_text(f->uuid, uuid), f->version);
    if (f->version != HT_FORMAT_VERSION)
        printf(" (this program has %u)", HT_FORMAT_VERSION);
    if (f->label[0] != '\0') {
        fputs(", label ", stdout);
        ht_put_printable(f->label, stdout);
    }
    printf("\n%-15s %-5s %-9s\n", "feature", "used", "older");
    put_bits(NULL, f);
    if (!can_open(f))
        puts("this program cannot open the store");
}

/* Values that may stand in udev's database, and in names of links where the key ends in _ENC. */
static void put_udev(const struct ht_super_words *f)
{
    char uuid[HT_UUID_TEXT_MAX], text[4 * sizeof(f->label) + 1];

    printf("ID_FS_TYPE=hitrain\nID_FS_USAGE=filesystem\nID_FS_VERSION=%u\n", f->version);
    printf("ID_FS_UUID=%s\nID_FS_UUID_ENC=%s\n", ht_uuid_text(f->uuid, uuid), uuid);
    if (f->label[0] == '\0')
        return;
    if (blkid_safe_string(f->label, text, sizeof(text)) == 0)
        printf("ID_FS_LABEL=%s\n", text);
    if (blkid_encode_string(f->label, text, sizeof(text)) == 0)
        printf("ID_FS_LABEL_ENC=%s\n", text);
}

int ht_cmd_features(const char *path, const struct ht_cmd_options *o)
{
    char device[PATH_MAX];
    struct ht_super_words f;

    if (device_of(path, device) < 0)
        return HT_CMD_FAILED;
    int rc = ht_features_read(device, &f);
    if (rc < 0)
        return ht_fail(HT_CMD_FAILED, "%s: %s", device,
                       rc == -EMEDIUMTYPE   ? "there is no hitrain store"
                           : rc == -EUCLEAN ? "no copy of the superblock is valid: run hitrain-fsck -n"
                           : rc == -EINVAL  ? "it is neither a device nor a regular file"
                           : rc == -EACCES  ? "Permission denied: run this as root"
                                            : strerror(-rc));
    if (o->udev)
        put_udev(&f);
    else if (o->json)
        put_json(device, &f);
    else
        put_for_people(device, &f);
    return HT_CMD_OK;
}
